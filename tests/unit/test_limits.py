"""Settings that shorten a run, as numbers: limits of batches, overfitting, a fast run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from framework import Strategy
from framework.types import Datasets
from tests.helpers.internals import (
    BatchPlan,
    Config,
    EpochSizes,
    EpochSteps,
    apply_fast_dev_run,
    apply_limit,
    apply_overfit_batches,
    epoch_steps,
    parse,
    plan_batches,
    steps_to_meeting,
    total_steps,
)
from tests.unit.config.raw import raw_config


def config(**trainer: Any) -> Config:
    whole = parse(raw_config())
    return replace(whole, trainer=replace(whole.trainer, **trainer))


def numbers(size: int) -> Any:
    return TensorDataset(torch.arange(size))


def items(dataset: Any) -> list[int]:
    return [int(dataset[index][0]) for index in range(len(dataset))]


def test_integers_are_batches_and_floats_are_shares() -> None:
    limits = (None, 3, 11, 0, 0.0, 1, 1.0, 0.55, 0.01)
    assert [apply_limit(10, limit) for limit in limits] == [10, 3, 10, 0, 0, 1, 10, 5, 1]


@given(total=st.integers(0, 10_000), limit=st.one_of(st.integers(0, 10_000), st.floats(0, 1)))
def test_a_positive_limit_leaves_something_and_never_adds(total: int, limit: float) -> None:
    left = apply_limit(total, limit)
    assert 0 <= left <= total
    assert bool(left) == bool(total and limit)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """20 batches or fewer, cut by `limit`, in steps of `accumulate` batches."""

    limit: float | None
    accumulate: int = 1
    windows: int


@pytest.mark.parametrize(
    "cut",
    [
        Cut(limit=None, windows=10),
        Cut(limit=3, windows=3),
        Cut(limit=100, windows=10),
        Cut(limit=0.5, windows=5),
        # There are 20 batches in 10 windows.
        Cut(limit=4, accumulate=2, windows=2),
        # An optimizer step never starts with a part of its batches.
        Cut(limit=3, accumulate=2, windows=2),
        Cut(limit=0.5, accumulate=2, windows=5),
        Cut(limit=1, accumulate=4, windows=1),
    ],
)
def test_training_is_cut_to_whole_optimizer_steps(cut: Cut) -> None:
    """Neither the parts of a pipeline's batch nor the number of processes change it."""
    settings = config(limit_train_batches=cut.limit, accumulate_grad_batches=cut.accumulate).trainer
    for parts, procs in ((1, 1), (4, 1), (1, 4)):
        size = 4 * procs * cut.accumulate
        plan = plan_batches(batch_size=4, global_batch_size=size, world_size=procs, accumulate=cut.accumulate * parts)
        steps = epoch_steps(settings, plan, sizes=EpochSizes(10 * size - 1))
        assert steps is not None
        assert steps.constant == cut.windows


def test_overfitting_uses_whole_global_batches_of_all_ranks() -> None:
    given = Datasets(train=numbers(50), val=numbers(9), test=numbers(9))
    plan = plan_batches(batch_size=2, global_batch_size=None, world_size=3, accumulate=2)
    for batches, left in ((2, 24), (0.25, 12), (99, 50)):
        few = apply_overfit_batches(given, config(overfit_batches=batches).trainer, plan)
        assert few.train is few.val
        assert few.test is None
        assert items(few.train) == list(range(left))


def test_a_fast_run_overrides_every_limit() -> None:
    fast = apply_fast_dev_run(config(fast_dev_run=3, max_epochs=7, max_steps=1, val_check_interval=1)).trainer
    assert (fast.limit_train_batches, fast.limit_val_batches, fast.limit_test_batches) == (3, 3, 3)
    assert (fast.max_epochs, fast.max_steps, fast.log_every_n_steps) == (1, None, 1)
    assert (fast.val_check_interval, fast.check_val_every_n_epoch) == (None, 1)


def test_total_steps_is_the_limit_that_comes_first() -> None:
    for max_steps, max_epochs, steps in ((None, 3, 18), (5, 3, 5), (100, 3, 18), (7, None, 7), (None, None, None)):
        settings = config(max_steps=max_steps, max_epochs=max_epochs).trainer
        six = EpochSteps(EpochSizes(6), BatchPlan(1, 1, 1))
        assert total_steps(settings, steps=six) == steps


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Steps to the next exchange, if there are exchanges, and to the meeting; logs are every 10 steps."""

    to_exchange: int | None
    step: int
    found: int


@pytest.mark.parametrize(
    "meeting",
    [
        Meeting(to_exchange=None, step=7, found=2),
        Meeting(to_exchange=1, step=7, found=1),
        Meeting(to_exchange=9, step=7, found=3),
        Meeting(to_exchange=2, step=7, found=2),
        Meeting(to_exchange=30, step=10, found=10),
        Meeting(to_exchange=30, step=19, found=1),
    ],
)
def test_ranks_meet_at_an_exchange_or_log(meeting: Meeting):
    strategy: Any = Strategy()
    if meeting.to_exchange is not None:
        strategy.steps_to_exchange = meeting.to_exchange
    assert steps_to_meeting(strategy, config(log_every_n_steps=10).trainer, step=meeting.step) == meeting.found
