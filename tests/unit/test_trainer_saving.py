"""The loop and its checkpoints, which are written beside it."""

from __future__ import annotations

import errno
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

from framework.checkpoint import CheckpointManager, load
from framework.checkpoint import manager as manager_module
from framework.errors import DiskError
from framework.trainer import Trainer
from framework.types import StepOutput
from tests.unit.simulated_ranks import cpu_context
from tests.unit.small_trainer import assert_equal, make_trainer, manager, samples, saved_steps, settings, weights

pytestmark = pytest.mark.usefixtures("own_state")


@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_is_written_beside_training_is_what_is_written_while_it_waits(tmp_path: Path, accumulate: int) -> None:
    folders = {asynchronous: tmp_path / str(asynchronous) for asynchronous in (True, False)}
    for asynchronous, folder in folders.items():
        checkpoints = manager(folder, every_n_steps=1, asynchronous=asynchronous)
        how = settings(max_steps=5, accumulate_grad_batches=accumulate, val_check_interval=2)
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        make_trainer(how, model=model, optimizer=Adam, val=samples(7), checkpoints=checkpoints).fit()
        checkpoints.close()
    assert saved_steps(folders[True]) == saved_steps(folders[False]) == [1, 2, 3, 4, 5]
    for step in range(1, 6):
        beside, waiting = (load(folder / f"step_{step:08d}", map_location="cpu") for folder in folders.values())
        for part in ("model", "training"):
            assert str(beside[part]) == str(waiting[part])
            assert_same_tensors(beside[part], waiting[part])


def assert_same_tensors(one: Any, other: Any) -> None:
    if isinstance(one, Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        for key in one:
            assert_same_tensors(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        for mine, theirs in zip(one, other, strict=True):
            assert_same_tensors(mine, theirs)


@pytest.mark.parametrize(("from_step", "how"), [(1, "counted"), (1, "through data"), (3, "counted")])
def test_a_model_that_moves_its_weights_in_forward_is_saved_all_the_same(
    tmp_path: Path, from_step: int, how: str
) -> None:
    """What it does in the first step is noticed; what torch counts is noticed also later, and costs one checkpoint."""

    class Drifting(nn.Linear):
        def __init__(self) -> None:
            torch.manual_seed(3)
            super().__init__(3, 1)
            self.step = 0

        def forward(self, inputs: Tensor) -> Tensor:
            self.step += 1
            if self.step >= from_step:
                with torch.no_grad():
                    (self.weight if how == "counted" else self.weight.data).mul_(0.99)
            return super().forward(inputs)

    told: list[str] = []
    checkpoints = manager(tmp_path, every_n_steps=2, asynchronous=True)
    checkpoints._warn = told.append
    make_trainer(settings(max_steps=6), model=Drifting(), checkpoints=checkpoints).fit()
    checkpoints.close()
    waiting = tmp_path / "waiting"
    make_trainer(settings(max_steps=6), model=Drifting(), checkpoints=manager(waiting, every_n_steps=2)).fit()
    assert [text.partition(".")[0] for text in told] == (
        [] if from_step == 1 else ["The checkpoint of step 2 was given up: model"]
    )
    assert saved_steps(tmp_path) == ([2, 4, 6] if from_step == 1 else [4, 6])
    for step in saved_steps(tmp_path):
        one, other = (load(folder / f"step_{step:08d}", map_location="cpu") for folder in (tmp_path, waiting))
        assert_same_tensors(one["model"], other["model"])


@pytest.mark.parametrize("recovers", [True, False])
def test_a_last_save_that_fails_is_tried_again_and_else_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recovers: bool
) -> None:
    calls = []

    def refuse(*_: Any) -> None:
        calls.append("save")
        if len(calls) == 2 or not recovers:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(manager_module, "require_room", refuse)
    checkpoints = manager(tmp_path, every_n_steps=2, asynchronous=True)
    checkpoints._warn = lambda _: None
    trainer = make_trainer(settings(max_steps=4), checkpoints=checkpoints)
    if recovers:
        trainer.fit()
        assert saved_steps(tmp_path) == [2, 4]
    else:
        with pytest.raises(DiskError, match=r"step 4 can't be written .*\n.*\n.* isn't saved\. Make room"):
            trainer.fit()
        assert saved_steps(tmp_path) == []
    checkpoints.close()
    assert len(calls) == 3


def test_a_save_by_the_clock_comes_with_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = manager(tmp_path, every_n_minutes=1.0)
    passed = iter(range(100))
    monkeypatch.setattr(CheckpointManager, "due_time", lambda _: next(passed) in (1, 3))
    make_trainer(settings(max_steps=9, log_every_n_steps=2), checkpoints=checkpoints).fit()
    assert saved_steps(tmp_path) == [4, 8, 9]


def test_a_resumed_run_steps_with_the_kernels_that_it_has_chosen_itself() -> None:
    """Not with those of the process that saved: it may have had another device, or a model that is spread."""
    before, after = (make_trainer(optimizer=partial(SGD, lr=0.05, foreach=own)).parts for own in (True, False))
    after.load_state_dict(before.state_dict(cpu_context()))
    assert [parts.optimizer.param_groups[0]["foreach"] for parts in (before, after)] == [True, False]


class Distilled(nn.Module):
    """A task that draws the model to a slow copy of itself, which the task keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(3, 1).requires_grad_(False)

    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        inputs, targets = batch
        output = model(inputs)
        for slow, fast in zip(self.teacher.parameters(), model.parameters(), strict=True):
            slow.lerp_(fast.detach(), 0.1)
        loss = (output.squeeze(1) - targets).square().mean() + (output - self.teacher(inputs)).square().mean()
        return StepOutput(loss, len(targets))

    validation_step = training_step


def test_what_a_task_keeps_is_resumed_exactly(tmp_path: Path) -> None:
    def made(max_steps: int) -> Trainer:
        torch.manual_seed(8)
        return make_trainer(
            settings(max_steps=max_steps), task=Distilled(), checkpoints=manager(tmp_path, every_n_steps=4)
        )

    whole, resumed = made(9), made(9)
    whole.fit()
    saved = load(tmp_path / "step_00000004", map_location="cpu")
    resumed.parts.bare_model.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["training"])
    resumed.fit()
    assert_equal(weights(resumed), weights(whole))
