"""Training ends before its limits: a callback wishes it, or somebody asks for it; several ranks do so together."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.distributed import HashStore

from framework import ending as ending_module
from framework import finite as finite_module
from framework import meter as meter_module
from framework import timing as timing_module
from framework import trainer as trainer_module
from framework.checkpoint import find, load
from framework.distributed.context import Context
from framework.errors import RunError
from framework.launch.board import Board
from framework.trainer import Trainer
from framework.types import StepOutput, StepReport
from tests.unit.simulated_ranks import SimulatedRanks
from tests.unit.small_trainer import (
    STEPS_PER_EPOCH,
    BadAt,
    Marks,
    Recorder,
    Squares,
    assert_equal,
    link,
    make_trainer,
    manager,
    samples,
    saved_steps,
    settings,
    weights,
)

pytestmark = pytest.mark.usefixtures("own_state", "no_waiting_for_the_disk")


@pytest.mark.parametrize("at", [3, STEPS_PER_EPOCH, 8])
def test_a_callback_stops_training_after_its_step(tmp_path: Path, at: int) -> None:
    recorder = Recorder({"step": at})
    trainer = make_trainer(callbacks={"recorder": recorder}, checkpoints=manager(tmp_path))
    trainer.fit()
    assert trainer.progress.step == at
    assert trainer.ending.reason == "seen enough"
    assert recorder.calls[-1][0] == "on_fit_end"
    assert saved_steps(tmp_path) == [at]


def test_a_callback_stops_training_after_an_evaluation() -> None:
    recorder = Recorder({"validation": 4})
    trainer = make_trainer(settings(val_check_interval=2), callbacks={"recorder": recorder}, val=samples(7))
    trainer.fit()
    assert (trainer.progress.step, trainer.ending.reason) == (4, "good enough")


class AskAt:
    """A callback that has this rank asked to stop after a step, as a watcher does from outside."""

    def __init__(self, marks: Marks, step: int) -> None:
        self.marks, self.step = marks, step

    def on_train_step_end(self, report: StepReport) -> None:
        if report.step == self.step:
            self.marks.asked_to_stop = signal.SIGTERM


@pytest.mark.parametrize("saved_already", [True, False])
def test_a_rank_alone_stops_at_once_when_asked_and_its_checkpoint_is_of_that_step(
    tmp_path: Path, saved_already: bool
) -> None:
    marks = Marks()
    trainer = make_trainer(
        callbacks={"ask": AskAt(marks, 3)},
        checkpoints=manager(tmp_path, every_n_steps=3 if saved_already else None),
        watched=link(marks),
    )
    trainer.fit()
    assert trainer.ending.was_stopped
    assert (trainer.ending.stopped_by, trainer.ending.reason, trainer.progress.step) == ("SIGTERM", None, 3)
    assert saved_steps(tmp_path) == [3]
    assert marks.seen.count("checkpoint") == 2  # to save it, and to wait until it is written


def test_stopped_and_gone_on_with_it_ends_as_if_never_stopped(tmp_path: Path) -> None:
    whole = make_trainer()
    whole.fit()
    marks = Marks()
    stopped = make_trainer(callbacks={"ask": AskAt(marks, 7)}, checkpoints=manager(tmp_path), watched=link(marks))
    stopped.fit()
    state = load(find(tmp_path), map_location="cpu")
    resumed = make_trainer()
    resumed.parts.bare_model.load_state_dict(state["model"])
    resumed.load_state_dict(state["training"])
    resumed.fit()
    assert resumed.progress == whole.progress
    assert_equal(weights(resumed), weights(whole))


@pytest.mark.parametrize("end", ["last step", "callback"])
def test_a_request_at_the_end_of_training_changes_nothing(end: str) -> None:
    marks = Marks()
    step = 12 if end == "last step" else 4
    callbacks = {"ask": AskAt(marks, step), "recorder": Recorder(None if end == "last step" else {"step": 4})}
    trainer = make_trainer(callbacks=callbacks, watched=link(marks))
    trainer.fit()
    assert trainer.progress.step == step
    assert not trainer.ending.was_stopped
    assert trainer.ending.stopped_by is None


# Several ranks agree


def run_ranks(monkeypatch: pytest.MonkeyPatch, make: Callable[[Context], Trainer]) -> list[Any]:
    """Trainers of two simulated ranks whose collectives are real, but for the gradients."""
    ranks = SimulatedRanks(2)
    for module in (meter_module, trainer_module, finite_module, ending_module, timing_module):
        monkeypatch.setattr(module, "gather_to_all", ranks.gather)
    monkeypatch.setattr(meter_module, "sum_over_ranks", ranks.sum)
    for module in (ending_module, trainer_module):
        monkeypatch.setattr(module, "any_over_ranks", ranks.any)
    monkeypatch.setattr(trainer_module, "check_equal", lambda *_, **__: None)  # nothing keeps the replicas equal

    def one(context: Context) -> Trainer:
        trainer = make(context)
        trainer.fit()
        return trainer

    return ranks.run(one)


@pytest.mark.parametrize(
    ("changes", "stop_at", "stopped"),
    [
        ({"log_every_n_steps": 2}, {"step": 1}, 2),
        ({"log_every_n_steps": 2}, {"step": 2}, 2),
        ({"log_every_n_steps": 100, "val_check_interval": 3}, {"step": 1}, 3),
        ({"log_every_n_steps": 100, "val_check_interval": 2}, {"validation": 2}, 2),
    ],
)
def test_ranks_stop_together_at_the_next_reduction_that_happens_anyway(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], stop_at: dict[str, int], stopped: int
) -> None:
    how = settings(**changes, max_epochs=4)

    def make(context: Context) -> Trainer:
        callbacks = {"recorder": Recorder(stop_at if context.rank == 1 else None)}
        return make_trainer(how, context=context, callbacks=callbacks, val=samples(7))

    first, second = run_ranks(monkeypatch, make)
    assert [first.progress.step, second.progress.step] == [stopped] * 2
    assert first.ending.reason == second.ending.reason == ("good enough" if "validation" in stop_at else "seen enough")


@pytest.mark.parametrize("asked_at", [(1, 1), (2, 4), (5, 3), (8, 8), (1, 11), (11, 11)])
def test_ranks_that_are_asked_at_different_times_stop_together(
    monkeypatch: pytest.MonkeyPatch, asked_at: tuple[int, int]
) -> None:
    store = HashStore()
    gradients = threading.Barrier(2, timeout=20)

    def make(context: Context) -> Trainer:
        marks = Marks()

        class InStep(Squares):
            """An optimizer step needs every rank's gradients."""

            def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
                gradients.wait()
                return super().training_step(model, batch)

        return make_trainer(
            settings(log_every_n_steps=100, max_steps=12, max_epochs=None, check_val_every_n_epoch=None),
            context=context,
            task=InStep(),
            callbacks={"ask": AskAt(marks, asked_at[context.rank])},
            watched=link(marks, lambda: Board(store)),
        )

    first, second = run_ranks(monkeypatch, make)
    assert first.progress.step == second.progress.step == min(max(asked_at) + 2, 12)
    assert first.ending.was_stopped == second.ending.was_stopped == (max(asked_at) + 2 < 12)


def test_a_bad_loss_of_one_rank_ends_all_with_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(context: Context) -> Trainer:
        task = BadAt(3) if context.rank == 1 else Squares()
        return make_trainer(settings(log_every_n_steps=4, max_epochs=4), context=context, task=task)

    for end in run_ranks(monkeypatch, make):
        assert isinstance(end, RunError)
        assert "since step 3 " in str(end)


def test_every_ranks_generators_are_saved_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = SimulatedRanks(3)
    for module in (trainer_module, finite_module):
        monkeypatch.setattr(module, "gather_to_all", ranks.gather)
    monkeypatch.setattr(trainer_module, "check_equal", lambda *_, **__: None)  # each thread draws weights of its own
    monkeypatch.setattr(trainer_module, "generator_states", lambda _: threading.get_ident())
    states: list[Any] = ranks.run(
        lambda context: (threading.get_ident(), make_trainer(context=context).state_dict()["generators"])
    )
    assert [saved for _, saved in states] == [[thread for thread, _ in states]] * 3


def test_a_wish_to_stop_that_was_not_agreed_yet_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 wishes to stop at step 4, which is saved; all agree with the log at 5, also having gone on from 4."""

    def make(context: Context, *, wishes: bool, folder: Path | None) -> Trainer:
        callback = Recorder({"step": 4} if wishes and context.rank == 1 else None)
        checkpoints = manager(folder / str(context.rank), every_n_steps=4) if folder else None
        how = settings(log_every_n_steps=5, max_steps=9)
        return make_trainer(how, context=context, callbacks={"recorder": callback}, checkpoints=checkpoints)

    ends = run_ranks(monkeypatch, lambda context: make(context, wishes=True, folder=tmp_path))
    assert [end.progress.step for end in ends] == [5, 5]

    def go_on(context: Context) -> Trainer:
        trainer = make(context, wishes=False, folder=None)
        state = load(tmp_path / str(context.rank) / "step_00000004", map_location="cpu")
        trainer.load_state_dict(state["training"])
        return trainer

    again = run_ranks(monkeypatch, go_on)
    assert [end.progress.step for end in again] == [5, 5]
    assert [end.ending.reason for end in again] == [end.ending.reason for end in ends]
