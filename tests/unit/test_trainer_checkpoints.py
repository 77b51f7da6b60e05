"""When the loop saves and what, saving beside training, and that a resumed run equals the uninterrupted one."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR

from framework.checkpoint import find, load, read_manifest
from framework.errors import DiskError
from framework.types import FitInfo, StepOutput
from tests.helpers.contexts import CPU
from tests.helpers.disks import full_at
from tests.helpers.exact import tree_differences
from tests.helpers.internals import CheckpointManager, Trainer, restore_generator_states
from tests.unit.checkpoint.states import manager_of
from tests.unit.small_trainer import (
    Numbers,
    Recorder,
    make_trainer,
    manager,
    samples,
    saved_steps,
    settings,
    weights,
    without_speed,
)

pytestmark = pytest.mark.usefixtures("own_state", "no_waiting_for_the_disk")


def resume(trainer: Trainer, state: dict[str, Any]) -> None:
    """Restore as a run does, except for the generators."""
    trainer.state.bare_model.load_state_dict(state["model"])
    trainer.load_state_dict(state["training"])


def at_step(folder: Path, step: int) -> dict[str, Any]:
    return load(folder / f"step_{step:08d}", map_location="cpu")


# Saving


@pytest.mark.parametrize(
    ("how", "keep", "saved"),
    [
        ({"max_epochs": 2}, {"every_n_epochs": 1}, [6, 12]),
        # The end of training is saved, too.
        ({"max_epochs": 3}, {"every_n_epochs": 2}, [12, 18]),
        ({"max_steps": 10}, {"every_n_steps": 4}, [4, 8, 10]),
        ({"max_steps": 10}, {}, [10]),
        ({"max_epochs": 2}, {"every_n_epochs": 1, "every_n_steps": 6}, [6, 12]),
        ({"max_steps": 10, "val_check_interval": 3}, {"monitor": "val/loss"}, [3, 6, 9, 10]),
    ],
)
def test_a_due_checkpoint_has_only_its_metrics(
    tmp_path: Path, how: dict[str, Any], keep: dict[str, Any], saved: list[int]
) -> None:
    numbers = Numbers()
    checkpoints = manager(tmp_path, **keep)
    make_trainer(settings(**how), val=samples(7), loggers={"numbers": numbers}, checkpoints=checkpoints).fit()
    assert saved_steps(tmp_path) == saved
    evaluated = {step: values for step, _, values in numbers.logged if "val/loss" in values}
    assert evaluated
    for step in saved:
        assert dict(read_manifest(tmp_path / f"step_{step:08d}").metrics) == evaluated.get(step, {})


def test_a_timed_checkpoint_comes_with_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passed = iter(range(100))
    monkeypatch.setattr(CheckpointManager, "due_time", lambda _: next(passed) in (1, 3))
    keep = manager(tmp_path, every_n_minutes=1.0)
    make_trainer(settings(max_steps=9, log_every_n_steps=2), checkpoints=keep).fit()
    assert saved_steps(tmp_path) == [4, 8, 9]


def test_saving_changes_no_logged_number(tmp_path: Path) -> None:
    numbers = Numbers()
    plain = Numbers()
    how = settings(log_every_n_steps=5, max_steps=12)
    make_trainer(how, loggers={"numbers": plain}).fit()
    make_trainer(how, loggers={"numbers": numbers}, checkpoints=manager(tmp_path, every_n_steps=3)).fit()
    assert [step for step, _ in numbers.of("train")] == [5, 10, 12]
    assert without_speed(numbers) == without_speed(plain)
    for step in (3, 6, 9):
        later = Numbers()
        resumed = make_trainer(how, loggers={"numbers": later})
        resume(resumed, at_step(tmp_path, step))
        resumed.fit()
        assert without_speed(later) == [row for row in without_speed(plain) if row[0] > step]


def test_logs_are_flushed_before_a_checkpoint(tmp_path: Path) -> None:
    flushed: list[tuple[int, list[int]]] = []

    class Buffering(Numbers):
        def flush(self) -> None:
            flushed.append((len(self.logged), saved_steps(tmp_path)))

    keep = manager(tmp_path, every_n_steps=2)
    make_trainer(settings(max_steps=4), loggers={"numbers": Buffering()}, checkpoints=keep).fit()
    assert flushed == [(2, []), (4, [2])]


# Beside training


def test_background_and_waiting_saves_are_equal(tmp_path: Path) -> None:
    folders = {asynchronous: tmp_path / str(asynchronous) for asynchronous in (True, False)}
    for asynchronous, folder in folders.items():
        keep = manager(folder, every_n_steps=1, asynchronous=asynchronous)
        how = settings(max_steps=5, accumulate_grad_batches=2, val_check_interval=2)
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        make_trainer(how, model=model, optimizer=Adam, val=samples(7), checkpoints=keep).fit()
        keep.close()
    assert saved_steps(folders[True]) == saved_steps(folders[False]) == [1, 2, 3, 4, 5]
    for step in range(1, 6):
        assert tree_differences(at_step(folders[True], step), at_step(folders[False], step)) == []


@pytest.mark.parametrize("from_step", [1, 3])
def test_a_self_modifying_model_is_saved_correctly(tmp_path: Path, from_step: int) -> None:
    """Torch's version counter misses the change."""

    class Drifting(nn.Linear):
        def __init__(self) -> None:
            torch.manual_seed(3)
            super().__init__(3, 1)
            self.step = 0

        def forward(self, inputs: Tensor) -> Tensor:
            self.step += 1
            if self.step >= from_step:
                with torch.no_grad():
                    (self.weight.data if from_step == 1 else self.weight).mul_(0.99)
            return super().forward(inputs)

    def train(folder: Path, **how: Any) -> None:
        keep = manager_of(folder, every_n_steps=2, monitor=None, save_top_k=-1, **how)
        make_trainer(settings(max_steps=6), model=Drifting(), checkpoints=keep).fit()
        keep.close()

    beside = tmp_path / "beside"
    waiting = tmp_path / "waiting"
    train(waiting, asynchronous=False)
    train(beside, asynchronous=True)
    assert saved_steps(beside) == [2, 4, 6]
    for step in saved_steps(beside):
        assert tree_differences(at_step(beside, step)["model"], at_step(waiting, step)["model"]) == []


@pytest.mark.parametrize("recovers", [True, False])
def test_a_failing_last_save_is_retried(tmp_path: Path, recovers: bool) -> None:
    with ExitStack() as disk:
        disk.enter_context(full_at(100))
        keep = manager_of(tmp_path, monitor=None, warn=lambda _: disk.close() if recovers else None)
        trainer = make_trainer(settings(max_steps=4), checkpoints=keep)
        if recovers:
            trainer.fit()
        else:
            with pytest.raises(DiskError, match=r"step 4 can't be written .*\n.*\n.* isn't saved\. Make room"):
                trainer.fit()
    assert saved_steps(tmp_path) == ([4] if recovers else [])


# Resuming


class Noisy(nn.Module):
    """Has all that a checkpoint must restore: parameters, buffers that training changes, a generator's draws."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layers(inputs)
        return output


class Distilled(nn.Module):
    """A task with a state: it draws the model to a slow copy of itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.teacher = nn.Linear(3, 1).requires_grad_(False)

    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        inputs, targets = batch
        output = model(inputs)
        slope = torch.linalg.lstsq(inputs, output.detach()).solution.t()
        self.teacher.weight.lerp_(slope, 0.1)
        loss = (output.squeeze(1) - targets).square().mean() + (output - self.teacher(inputs)).square().mean()
        return StepOutput(loss, len(targets))

    validation_step = training_step


@pytest.mark.parametrize(
    ("optimizer", "accumulate", "stopped_at"), [(Adam, 1, 1), (Adam, 2, 4), (SGD, 2, 3), (SGD, 1, 6)]
)
def test_a_resumed_run_equals_an_uninterrupted_one(
    tmp_path: Path, optimizer: Any, accumulate: int, stopped_at: int
) -> None:
    """It stops after 1 step, within an epoch, and at its end (of 6 steps, or 3 where two batches make one)."""
    rates = {"lr": 0.01} if optimizer is Adam else {"lr": 0.05, "momentum": 0.9}

    def make(folder: Path, *, max_steps: int, numbers: Numbers) -> Trainer:
        return make_trainer(
            settings(max_steps=max_steps, max_epochs=9, accumulate_grad_batches=accumulate),
            model=Noisy(),
            task=Distilled() if optimizer is Adam else None,
            optimizer=lambda parameters: optimizer(parameters, **rates),
            scheduler=lambda opt: StepLR(opt, step_size=4, gamma=0.7),
            interval="step",
            loggers={"numbers": numbers},
            checkpoints=manager(folder),
        )

    one = Numbers()
    parts = Numbers()
    whole = make(tmp_path / "whole", max_steps=9, numbers=one)
    torch.manual_seed(5)
    whole.fit()
    first = make(tmp_path / "parts", max_steps=stopped_at, numbers=parts)
    torch.manual_seed(5)
    first.fit()
    state = load(find(tmp_path / "parts"), map_location="cpu")
    # Another process has drawn other numbers.
    torch.manual_seed(999)
    second = make(tmp_path / "parts", max_steps=9, numbers=parts)
    resume(second, state)
    assert restore_generator_states(state["generators"][0], devices=[CPU])
    second.fit()
    assert tree_differences(weights(second), weights(whole)) == []
    assert second.progress == whole.progress
    assert without_speed(parts) == without_speed(one)
    # The weights, the optimizer's state and the generators' among it.
    ends = [load(find(tmp_path / name), map_location="cpu") for name in ("whole", "parts")]
    assert tree_differences(*ends) == []


def test_a_new_callback_gets_no_state() -> None:
    trainer = make_trainer(settings(max_steps=4), callbacks={"old": Recorder()})
    trainer.fit()
    new = Recorder()
    old = Recorder()
    again = make_trainer(callbacks={"new": new, "old": old})
    again.load_state_dict(trainer.state.state_dict()["training"])
    assert (new.calls, old.calls) == ([], [("load_state_dict", {"steps": 4})])


def test_generators_are_restored_after_everything_that_may_draw() -> None:
    class Draws:
        def on_fit_start(self, info: FitInfo) -> None:
            torch.rand(3)

    trainer = make_trainer(settings(max_steps=1), callbacks={"draws": Draws()})
    trainer.restore_generators = lambda: torch.manual_seed(77)
    trainer.fit()
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(77).get_state())


def test_resuming_a_finished_run_saves_nothing_again(tmp_path: Path) -> None:
    make_trainer(checkpoints=manager(tmp_path)).fit()
    (manifest,) = tmp_path.glob("step_*/manifest.json")
    before = manifest.stat().st_mtime_ns
    again = make_trainer(checkpoints=manager(tmp_path))
    resume(again, load(find(tmp_path), map_location="cpu"))
    again.fit()
    assert manifest.stat().st_mtime_ns == before


def test_a_resumed_run_chooses_its_own_kernels() -> None:
    """The saved run may have had another device or a sharded model."""
    before, after = (make_trainer(optimizer=partial(SGD, lr=0.05, foreach=own)).state for own in (True, False))
    after.load_state_dict(before.state_dict()["training"])
    assert [parts.optimizer.param_groups[0]["foreach"] for parts in (before, after)] == [True, False]
