"""Traces of some training steps."""

from __future__ import annotations

import json
import logging

import pytest
import torch

from framework.callbacks.profiler import TorchProfiler
from framework.distributed.context import Context
from framework.errors import ConfigError
from framework.run_dir import RunDir
from framework.topology import Topology
from tests.unit.small_trainer import Squares, make_trainer, settings

CONTEXT = Context(Topology(1, 1, 0, 1), 0, 0, 0, (torch.device("cpu"),), "gloo")
WRONG = [{"wait": -1}, {"warmup": -1}, {"active": 0}]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    monkeypatch.setenv("KINETO_LOG_LEVEL", "5")  # as the profiler itself sets it


@pytest.mark.parametrize("keywords", WRONG, ids=str)
def test_wrong_numbers_of_steps_are_refused(tmp_path, keywords):
    with pytest.raises(ConfigError, match="numbers of steps"):
        TorchProfiler(context=CONTEXT, run_dir=RunDir(tmp_path), **keywords)


class FailsAt(Squares):
    """Raises in the training step after `steps`."""

    def __init__(self, steps):
        self.left = steps

    def training_step(self, model, batch):
        if self.left == 0:
            raise ArithmeticError("of the task")
        self.left -= 1
        return super().training_step(model, batch)


def profiler(folder, **keywords):
    return TorchProfiler(context=CONTEXT, run_dir=RunDir(folder), **{"wait": 1, "warmup": 1, "active": 5, **keywords})


def recorded_steps(folder):
    (trace,) = (folder / "profile").iterdir()
    return {each["name"] for each in json.loads(trace.read_text())["traceEvents"] if "ProfilerStep" in each["name"]}


def test_a_failing_training_leaves_what_it_recorded(tmp_path, capsys):
    recording = profiler(tmp_path)
    with pytest.raises(ArithmeticError):
        make_trainer(task=FailsAt(4), callbacks={"profiler": recording}).fit()
    recording.close()
    recording.close()
    assert recorded_steps(tmp_path) >= {"ProfilerStep#2", "ProfilerStep#3"}
    assert str(tmp_path / "profile") in capsys.readouterr().out


def test_a_failure_before_the_recording_leaves_nothing(tmp_path, caplog):
    recording = profiler(tmp_path)
    with pytest.raises(ArithmeticError):
        make_trainer(task=FailsAt(1), callbacks={"profiler": recording}).fit()
    recording.close()
    assert list(tmp_path.iterdir()) == []
    assert not caplog.records


def test_a_folder_that_cannot_be_made_does_not_hide_the_failure(tmp_path, caplog):
    recording = profiler(tmp_path)
    with pytest.raises(ArithmeticError):
        make_trainer(task=FailsAt(4), callbacks={"profiler": recording}).fit()
    (tmp_path / "profile").write_text("")
    with caplog.at_level(logging.WARNING, logger="framework"):
        recording.close()
    assert "TorchProfiler can't write what it recorded" in caplog.text


def test_a_run_that_records_nothing_says_so_despite_earlier_traces(tmp_path, caplog, capsys):
    make_trainer(settings(max_steps=4), callbacks={"profiler": profiler(tmp_path)}).fit()
    earlier = recorded_steps(tmp_path)
    capsys.readouterr()
    trainer = make_trainer(settings(max_steps=6), callbacks={"profiler": profiler(tmp_path, wait=10)})
    trainer.progress.step = 4
    with caplog.at_level(logging.WARNING, logger="framework"):
        trainer.fit()
    assert "TorchProfiler recorded nothing: training ended before step 20." in caplog.text
    assert capsys.readouterr().out == ""
    assert recorded_steps(tmp_path) == earlier
