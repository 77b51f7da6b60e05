"""What the loop saves and when, and that a run goes on from it as if it had never stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import StepLR

from framework.checkpoint import find, load, read_manifest
from framework.config.schema import Interval
from framework.seed import restore_generator_states
from framework.trainer import Trainer
from framework.types import FitInfo
from tests.unit.simulated_ranks import CPU
from tests.unit.small_trainer import (
    Numbers,
    Recorder,
    assert_equal,
    make_trainer,
    manager,
    samples,
    saved_steps,
    settings,
    weights,
    without_speed,
)

pytestmark = pytest.mark.usefixtures("own_state", "no_waiting_for_the_disk")


# Saving


@pytest.mark.parametrize(
    ("how", "keep", "saved"),
    [
        ({"max_epochs": 2}, {"every_n_epochs": 1}, [6, 12]),
        ({"max_epochs": 3}, {"every_n_epochs": 2}, [12, 18]),  # and the end
        ({"max_steps": 10}, {"every_n_steps": 4}, [4, 8, 10]),
        ({"max_steps": 10}, {}, [10]),
        ({"max_epochs": 2}, {"every_n_epochs": 1, "every_n_steps": 6}, [6, 12]),
        ({"max_steps": 10, "val_check_interval": 3}, {"monitor": "val/loss"}, [3, 6, 9, 10]),
        ({"max_epochs": 2}, {"enabled": False, "every_n_steps": 1}, []),
    ],
)
def test_it_saves_when_it_is_due_and_at_the_end(
    tmp_path: Path, how: dict[str, Any], keep: dict[str, Any], saved: list[int]
) -> None:
    make_trainer(settings(**how), val=samples(7), checkpoints=manager(tmp_path, **keep)).fit()
    assert saved_steps(tmp_path) == saved


def test_a_checkpoint_holds_metrics_only_of_its_own_weights(tmp_path: Path) -> None:
    numbers = Numbers()
    how = settings(max_steps=6, val_check_interval=3)
    keep = manager(tmp_path, every_n_steps=1, monitor="val/loss")
    make_trainer(how, val=samples(7), loggers={"numbers": numbers}, checkpoints=keep).fit()
    evaluated = {step: values for step, _, values in numbers.logged if "val/loss" in values}
    manifests = {step: read_manifest(tmp_path / f"step_{step:08d}") for step in range(1, 7)}
    assert {step: dict(manifest.metrics) for step, manifest in manifests.items()} == {
        step: evaluated.get(step, {}) for step in range(1, 7)
    }


def test_what_is_logged_does_not_depend_on_when_it_is_saved(tmp_path: Path) -> None:
    numbers, plain = Numbers(), Numbers()
    how = settings(log_every_n_steps=5, max_steps=12)
    make_trainer(how, loggers={"numbers": plain}).fit()
    make_trainer(how, loggers={"numbers": numbers}, checkpoints=manager(tmp_path, every_n_steps=3)).fit()
    assert [step for step, _ in numbers.of("train")] == [5, 10, 12]
    assert without_speed(numbers) == without_speed(plain)
    for step in (3, 6, 9):
        later = Numbers()
        resumed = make_trainer(how, loggers={"numbers": later})
        state = load(tmp_path / f"step_{step:08d}", map_location="cpu")
        resumed.parts.bare_model.load_state_dict(state["model"])
        resumed.load_state_dict(state["training"])
        resumed.fit()
        assert without_speed(later) == [row for row in without_speed(plain) if row[0] > step]


def test_what_was_logged_is_written_before_a_checkpoint_counts(tmp_path: Path) -> None:
    class Buffering(Numbers):
        """Writes late, as TensorBoard's does."""

        def __init__(self) -> None:
            super().__init__()
            self.flushed: list[tuple[int, list[int]]] = []

        def flush(self) -> None:
            self.flushed.append((len(self.logged), saved_steps(tmp_path)))

    logger = Buffering()
    how = settings(max_steps=4)
    make_trainer(how, loggers={"numbers": logger}, checkpoints=manager(tmp_path, every_n_steps=2)).fit()
    assert logger.flushed == [(2, []), (4, [2])]


# Going on


class Noisy(nn.Module):
    """Has all that a checkpoint must bring back: parameters, buffers that training moves, draws of a generator."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layers(inputs)
        return output


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "momentum": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: Adam(parameters, lr=0.01),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("stopped_at", [1, 3, 4, 6])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    tmp_path: Path, optimizer: str, accumulate: int, stopped_at: int
) -> None:
    """After 1 step, in mid-epoch, and at the end of an epoch (of 6, or of 3 steps when two batches make one)."""

    def make(folder: Path, *, max_steps: int, numbers: Numbers) -> Trainer:
        return make_trainer(
            settings(max_steps=max_steps, max_epochs=9, accumulate_grad_batches=accumulate),
            model=Noisy(),
            optimizer=OPTIMIZERS[optimizer],
            scheduler=lambda opt: StepLR(opt, step_size=4, gamma=0.7),
            interval=Interval.STEP,
            loggers={"numbers": numbers},
            val=samples(7),
            checkpoints=manager(folder),
        )

    one, parts = Numbers(), Numbers()
    whole = make(tmp_path / "a", max_steps=9, numbers=one)
    torch.manual_seed(5)
    whole.fit()
    first = make(tmp_path / "b", max_steps=stopped_at, numbers=parts)
    torch.manual_seed(5)
    first.fit()
    state = load(find(tmp_path / "b"), map_location="cpu")
    torch.manual_seed(999)  # another process, which has drawn other numbers
    second = make(tmp_path / "b", max_steps=9, numbers=parts)
    second.parts.bare_model.load_state_dict(state["model"])
    second.load_state_dict(state["training"])
    assert restore_generator_states(state["generators"][0], devices=[CPU])
    second.fit()
    assert_equal(weights(second), weights(whole))
    assert without_speed(parts) == without_speed(one)
    assert second.progress == whole.progress
    assert_same_tree(second.parts.optimizer.state_dict(), whole.parts.optimizer.state_dict())
    assert torch.equal(state_of_generator(tmp_path / "a"), state_of_generator(tmp_path / "b"))


def state_of_generator(folder: Path) -> Tensor:
    tensor: Tensor = load(find(folder), map_location="cpu")["generators"][0]["cpu"]
    return tensor


def assert_same_tree(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same_tree(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same_tree(a, b)
    else:
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


def test_callbacks_get_their_own_state_back_and_a_new_one_none() -> None:
    old, new = Recorder(), Recorder()
    trainer = make_trainer(settings(max_steps=4), callbacks={"old": old})
    trainer.fit()
    again = make_trainer(callbacks={"new": new, "old": (old_again := Recorder())})
    again.load_state_dict(trainer.state_dict()["training"])
    assert old_again.calls == [("load_state_dict", {"steps": 4})]
    assert new.calls == []
    again.fit()
    assert new.named("on_fit_start")[0].start_step == 4


@pytest.mark.usefixtures("own_state", "no_waiting_for_the_disk")
def test_generators_are_restored_after_everything_that_may_draw() -> None:
    class Draws:
        def on_fit_start(self, info: FitInfo) -> None:
            torch.rand(3)

    trainer = make_trainer(settings(max_steps=1), callbacks={"draws": Draws()})
    trainer.restore_generators = lambda: torch.manual_seed(77)
    trainer.fit()
    assert torch.initial_seed() == 77
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(77).get_state())


def test_going_on_after_the_end_saves_nothing_again(tmp_path: Path) -> None:
    trainer = make_trainer(checkpoints=manager(tmp_path))
    trainer.fit()
    (manifest,) = tmp_path.glob("step_*/manifest.json")
    before = manifest.stat().st_mtime_ns
    again = make_trainer(checkpoints=manager(tmp_path))
    again.load_state_dict(load(find(tmp_path), map_location="cpu")["training"])
    again.fit()
    assert manifest.stat().st_mtime_ns == before
