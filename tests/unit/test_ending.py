"""Training ends before its limits if a callback or a signal asks for it; several ranks stop after the same step."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import FileStore

from framework.checkpoint import find, load
from framework.errors import RunError
from framework.strategies import DDP
from framework.types import StepInfo
from tests.helpers.internals import Context, RunStore, Trainer
from tests.helpers.rank_pool import RankPool
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


class AskAt:
    """A callback that has this rank asked to stop after a step, as its launcher would."""

    def __init__(self, marks: Marks, step: int) -> None:
        self.marks = marks
        self.step = step

    def on_train_step_end(self, report: StepInfo) -> None:
        if report.step == self.step:
            self.marks.stop_signal = signal.SIGTERM


# One rank


@pytest.mark.parametrize("at", [4, STEPS_PER_EPOCH])
def test_a_callback_stops_training_after_its_step(tmp_path: Path, at: int) -> None:
    recorder = Recorder({"step": at})
    # There is nobody to agree with.
    alone = settings(log_every_n_steps=100)
    trainer = make_trainer(alone, callbacks={"recorder": recorder}, checkpoints=manager(tmp_path))
    trainer.fit()
    assert (trainer.progress.step, trainer.stop.reason) == (at, "seen enough")
    assert recorder.calls[-1][0] == "on_fit_end"
    assert saved_steps(tmp_path) == [at]


def test_a_requested_stop_resumes_exactly(tmp_path: Path) -> None:
    marks = Marks()
    stopped = make_trainer(callbacks={"ask": AskAt(marks, 7)}, checkpoints=manager(tmp_path), watched=link(marks))
    stopped.fit()
    assert (stopped.stop.on_request, stopped.stop.stopped_by, stopped.stop.reason) == (True, "SIGTERM", None)
    assert stopped.progress.step == 7
    assert saved_steps(tmp_path) == [7]
    state = load(find(tmp_path), map_location="cpu")
    whole = make_trainer()
    resumed = make_trainer()
    whole.fit()
    resumed.state.bare_model.load_state_dict(state["model"])
    resumed.load_state_dict(state["training"])
    resumed.fit()
    assert resumed.progress == whole.progress
    assert_equal(weights(resumed), weights(whole))


@pytest.mark.parametrize("end", ["last step", "callback"])
def test_a_stop_at_the_end_changes_nothing(end: str) -> None:
    marks = Marks()
    step = 12 if end == "last step" else 4
    callbacks = {"ask": AskAt(marks, step), "recorder": Recorder(None if end == "last step" else {"step": 4})}
    trainer = make_trainer(callbacks=callbacks, watched=link(marks))
    trainer.fit()
    assert trainer.progress.step == step
    assert not trainer.stop.on_request
    assert trainer.stop.stopped_by is None


# Several ranks


def trained(context: Context, changes: dict[str, Any], **parts: Any) -> Trainer:
    torch.manual_seed(0)
    trainer = make_trainer(settings(**changes), context=context, strategy=DDP(context=context), **parts)
    trainer.fit()
    return trainer


def stop_on_rank_1(context: Context, changes: dict[str, Any], stop_at: dict[str, int]) -> tuple[int, str | None]:
    recorder = Recorder(stop_at if context.rank == 1 else None)
    trainer = trained(context, {"max_epochs": 8, **changes}, callbacks={"recorder": recorder}, val=samples(7))
    return trainer.progress.step, trainer.stop.reason


@pytest.mark.parametrize(
    ("changes", "stop_at", "stopped"),
    [
        ({"log_every_n_steps": 2}, {"step": 1}, 2),
        # Ranks meet at the end of an epoch.
        ({"log_every_n_steps": 100}, {"step": 1}, 3),
        ({"log_every_n_steps": 100, "val_check_interval": 2}, {"step": 1}, 2),
        ({"log_every_n_steps": 100, "val_check_interval": 2}, {"validation": 2}, 2),
    ],
)
def test_ranks_stop_at_the_next_common_point(
    rank_pool: RankPool, changes: dict[str, Any], stop_at: dict[str, int], stopped: int
) -> None:
    reason = "good enough" if "validation" in stop_at else "seen enough"
    assert rank_pool.run(stop_on_rank_1, changes, stop_at) == [(stopped, reason)] * 2


def stop_as_asked(context: Context, asked_at: tuple[int, ...], store: str) -> tuple[int, bool]:
    marks = Marks()
    trainer = trained(
        context,
        {"log_every_n_steps": 100, "max_steps": 12, "max_epochs": None, "check_val_every_n_epoch": None},
        data=samples(12 * 8),
        callbacks={"ask": AskAt(marks, asked_at[context.rank])},
        watched=link(marks, lambda: RunStore(FileStore(store, context.world_size))),
    )
    return trainer.progress.step, trainer.stop.on_request


@pytest.mark.parametrize("asked_at", [(1, 1), (2, 4), (1, 11), (11, 11)])
def test_ranks_asked_at_different_times_stop_together(
    rank_pool: RankPool, tmp_path: Path, asked_at: tuple[int, ...]
) -> None:
    """Two steps after the last one was asked, or at the end of training."""
    ends = rank_pool.run(stop_as_asked, asked_at, str(tmp_path / "store"))
    assert len(set(ends)) == 1
    step, on_request = ends[0]
    assert max(asked_at) < step <= min(max(asked_at) + 2, 12)
    assert on_request == (step < 12)


def bad_on_rank_1(context: Context) -> str:
    task = BadAt(3, value=math.nan) if context.rank == 1 else Squares()
    with pytest.raises(RunError) as caught:
        trained(context, {"log_every_n_steps": 4, "max_epochs": 4}, task=task)
    return str(caught.value)


def test_one_bad_loss_ends_all_ranks(rank_pool: RankPool) -> None:
    for message in rank_pool.run(bad_on_rank_1):
        assert "since step 3 " in message


def generators(context: Context) -> tuple[list[int], list[Any]]:
    torch.manual_seed(context.rank)
    trainer = make_trainer(context=context, model=nn.Linear(3, 1), strategy=DDP(context=context))
    own = torch.get_rng_state().tolist()
    return own, [state["cpu"].tolist() for state in trainer.state.state_dict()["generators"]]


def test_every_ranks_generators_are_saved_in_their_order(rank_pool: RankPool) -> None:
    ends = rank_pool.run(generators, ranks=3)
    own = [state for state, _ in ends]
    assert own[0] != own[1] != own[2]
    assert [saved for _, saved in ends] == [own] * 3


def wish_at_step_4(context: Context, folder: str, *, resumes: bool) -> tuple[int, str | None]:
    mine = Path(folder, str(context.rank))
    asks = context.rank == 1 and not resumes
    trainer = make_trainer(
        settings(log_every_n_steps=5, max_steps=9),
        context=context,
        strategy=DDP(context=context),
        data=samples(100),
        callbacks={"recorder": Recorder({"step": 4} if asks else None)},
        checkpoints=None if resumes else manager(mine, every_n_steps=4),
    )
    if resumes:
        state = load(mine / "step_00000004", map_location="cpu")
        trainer.state.bare_model.load_state_dict(state["model"])
        trainer.load_state_dict(state["training"])
    trainer.fit()
    return trainer.progress.step, trainer.stop.reason


def test_a_pending_stop_of_a_callback_is_saved(rank_pool: RankPool, tmp_path: Path) -> None:
    """Rank 1 asks at step 4, which is saved; all agree with the log at 5, in the resumed run too."""
    for resumes in (False, True):
        ends = rank_pool.run(wish_at_step_4, str(tmp_path), resumes=resumes)
        assert ends == [(5, "seen enough")] * 2
