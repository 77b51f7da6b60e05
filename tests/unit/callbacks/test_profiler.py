"""Traces of some training steps."""

from __future__ import annotations

import json
import logging

import pytest

from framework.errors import RunError
from tests.helpers.contexts import cpu_context
from tests.helpers.internals import RunDir, TorchProfiler
from tests.unit.small_trainer import BadAt, make_trainer, settings


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    # The profiler itself sets it to this value.
    monkeypatch.setenv("KINETO_LOG_LEVEL", "6")


def profiler(folder, **keywords):
    return TorchProfiler(
        context=cpu_context(), run_dir=RunDir(folder), **{"wait": 1, "warmup": 1, "active": 5, **keywords}
    )


def recorded_steps(folder):
    (trace,) = (folder / "profile").iterdir()
    return {each["name"] for each in json.loads(trace.read_text())["traceEvents"] if "ProfilerStep" in each["name"]}


def failed(folder, *, at):
    """The profiler of a training that failed after so many steps."""
    recording = profiler(folder)
    with pytest.raises(RunError):
        make_trainer(task=BadAt(at), callbacks={"profiler": recording}).fit()
    return recording


def test_a_failing_training_leaves_what_it_recorded(tmp_path, capsys):
    recording = failed(tmp_path, at=4)
    recording.close()
    recording.close()
    assert recorded_steps(tmp_path) >= {"ProfilerStep#2", "ProfilerStep#3"}
    assert str(tmp_path / "profile") in capsys.readouterr().out


def test_an_unwritable_folder_hides_no_failure(tmp_path, caplog):
    recording = failed(tmp_path, at=4)
    (tmp_path / "profile").write_text("")
    with caplog.at_level(logging.WARNING, logger="framework"):
        recording.close()
    assert "TorchProfiler can't write what it recorded" in caplog.text


def test_recording_nothing_is_reported_despite_earlier_traces(tmp_path, capsys):
    make_trainer(settings(max_steps=4), callbacks={"profiler": profiler(tmp_path)}).fit()
    earlier = recorded_steps(tmp_path)
    capsys.readouterr()
    trainer = make_trainer(settings(max_steps=6), callbacks={"profiler": profiler(tmp_path, wait=10)})
    trainer.progress.step = 4
    trainer.fit()
    # The first of the recorded steps.
    assert "The profiler recorded nothing: training ended before step 16. " in capsys.readouterr().out
    assert recorded_steps(tmp_path) == earlier
