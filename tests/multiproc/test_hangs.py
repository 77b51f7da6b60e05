"""Every phase has a time-out, on one process too: the report says where the rank hangs, and the run ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.multiproc, pytest.mark.usefixtures("own_state")]
exhaustive = pytest.mark.exhaustive

HANGING = """
import os, time
import torch
from torch.utils.data import Dataset
from framework import Datasets, StepOutput

PLACE = os.environ["HANG_IN"]
RANK = os.environ["HANG_ON"]

def hang():
    time.sleep(600)

def come_to(place):
    if place == PLACE and os.environ["RANK"] == RANK:
        hang()

class Samples(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        if index == 20:
            come_to("data")
        return torch.full((4,), index / 40), torch.full((1,), index / 40)

def samples():
    come_to("datasets")
    return Datasets(Samples(), Samples())

class Task:
    def training_step(self, model, batch):
        come_to("training_step")
        return StepOutput(((model(batch[0]) - batch[1]) ** 2).mean(), len(batch[0]))
    def validation_step(self, model, batch):
        come_to("validation_step")
        return self.training_step(model, batch)

class Callback:
    def on_fit_start(self, info):
        come_to("on_fit_start")
    def on_train_step_end(self, report):
        if PLACE == "close after a failure" and os.environ["RANK"] == RANK:
            raise ValueError("the failure")
    def on_fit_end(self):
        come_to("on_fit_end")
    def close(self):
        come_to("close")
        come_to("close after a failure")

class SlowTask(Task):
    def validation_step(self, model, batch):
        time.sleep(0.5)
        return self.training_step(model, batch)
"""
RECIPE = """# @package _global_
model: {_target_: torch.nn.Linear, in_features: 4, out_features: 1}
data: {datasets: {_target_: hanging.samples}, global_batch_size: 8, num_workers: 0}
task: {_target_: hanging.Task}
callbacks: {own: {_target_: hanging.Callback}}
trainer: {max_epochs: 1, num_sanity_val_steps: 0}
"""


@pytest.fixture
def hang(train: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Train with code that hangs in one place; return what the report says of the first rank that failed."""
    (tmp_path / "hanging.py").write_text(HANGING)
    recipe = tmp_path / "conf/recipe/hanging.yaml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text(RECIPE)

    def run(place: str, *overrides: str, rank: int = 0, procs: int = 1) -> dict[str, Any]:
        monkeypatch.setenv("HANG_IN", place)
        monkeypatch.setenv("HANG_ON", str(rank))
        times = ("backend.timeout=1.5s", "backend.init_timeout=4s", f"topology.procs_per_node={procs}")
        run_dir = train("recipe=hanging", *times, *overrides, status=1)
        first: dict[str, Any] = json.loads((run_dir / "failure.json").read_text())["first"]
        assert first["rank"] == rank
        return first

    return run


@pytest.mark.parametrize(
    ("place", "phase", "hook"),
    [
        ("data", "data", None),
        ("close", "closing", "close"),
        pytest.param("datasets", "starting", None, marks=exhaustive),
        pytest.param("on_fit_start", "logging", "on_fit_start", marks=exhaustive),
        pytest.param("training_step", "forward", None, marks=exhaustive),
        pytest.param("validation_step", "evaluate", None, marks=exhaustive),
        pytest.param("on_fit_end", "logging", "on_fit_end", marks=exhaustive),
    ],
)
def test_a_single_process_that_hangs_is_ended(
    hang: Callable[..., Any], capfd: pytest.CaptureFixture[str], place: str, phase: str, hook: str | None
) -> None:
    first = hang(place)
    assert (first["kind"], first["phase"]) == ("hung", phase)
    named = (first["hook"] or "").partition(" at hanging.py:")[0]
    assert named == (hook or "")
    assert "hung: no progress for " in first["cause"]
    printed = capfd.readouterr().err
    assert "  stack    hang at hanging.py:" in printed
    words = " ".join(printed.split())
    assert "If it is only slow, raise backend." in words
    if hook is not None:
        assert f"try It was in {hook} at hanging.py:" in words


def test_a_loader_worker_that_hangs_is_shown(hang: Callable[..., Any], capfd: pytest.CaptureFixture[str]) -> None:
    first = hang("data", "data.num_workers=2")
    assert (first["kind"], first["phase"]) == ("hung", "data")
    assert first["stacks"].count("Data worker, pid ") == 2
    assert "  stack    hang at hanging.py:" in capfd.readouterr().err


def test_a_hang_in_closing_is_ended(hang: Callable[..., Any], capfd: pytest.CaptureFixture[str]) -> None:
    first = hang("close after a failure")
    assert (first["kind"], first["cause"]) == ("exception", "ValueError: the failure")
    assert "  closing  hang at hanging.py:" in capfd.readouterr().err


@exhaustive
@pytest.mark.parametrize(("place", "rank"), [("close", 0), ("close", 1), ("close after a failure", 1), ("data", 1)])
def test_one_of_two_that_hangs_is_named(hang: Callable[..., Any], place: str, rank: int) -> None:
    first = hang(place, rank=rank, procs=2)
    assert first["kind"] == ("exception" if "failure" in place else "hung")
    assert "in hang" in first["stacks"]


def test_a_long_validation_is_no_hang(train: Callable[..., Path], hang: Callable[..., Any], monkeypatch: Any) -> None:
    """Each batch is progress: all of them take longer than the time-out."""
    monkeypatch.setenv("HANG_IN", "nothing")
    monkeypatch.setenv("HANG_ON", "0")
    train("recipe=hanging", "task._target_=hanging.SlowTask", "backend.timeout=2s")


def test_in_the_commands_own_process_nothing_is_bounded(
    train: Callable[..., Path], hang: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """People sit at breakpoints there."""
    monkeypatch.setenv("HANG_IN", "nothing")
    monkeypatch.setenv("HANG_ON", "0")
    monkeypatch.setenv("RANK", "0")
    train("recipe=hanging", "launcher=in_process", "task._target_=hanging.SlowTask", "backend.timeout=0.1s")
