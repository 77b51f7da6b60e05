"""Settings that shorten a run, as numbers: limits of batches, overfitting, a fast run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from framework.config.parse import parse
from framework.config.schema import Config
from framework.data.batching import plan_batches
from framework.limits import limited, overfitted, shortened, steps_to_meeting, total_steps, train_windows
from framework.strategies.single import AsItIs
from framework.types import Datasets
from tests.unit.config.raw import raw_config


def config(**trainer: Any) -> Config:
    whole = parse(raw_config())
    return replace(whole, trainer=replace(whole.trainer, **trainer))


def numbers(size: int) -> Any:
    return TensorDataset(torch.arange(size))


def items(dataset: Any) -> list[int]:
    return [int(dataset[index][0]) for index in range(len(dataset))]


@pytest.mark.parametrize(
    ("limit", "left"),
    [(None, 10), (3, 3), (11, 10), (0, 0), (0.0, 0), (1, 1), (1.0, 10), (0.5, 5), (0.55, 5), (0.01, 1)],
)
def test_a_whole_number_counts_batches_and_a_float_is_a_share(limit: float | None, left: int) -> None:
    assert limited(10, limit) == left


@given(total=st.integers(0, 10_000), limit=st.one_of(st.integers(0, 10_000), st.floats(0, 1)))
def test_a_limit_never_adds_and_leaves_something_if_it_is_above_zero(total: int, limit: float) -> None:
    left = limited(total, limit)
    assert 0 <= left <= total
    assert bool(left) == bool(total and limit)


@pytest.mark.parametrize(
    ("limit", "accumulate", "windows"),
    [
        (None, 1, None),
        (3, 1, 3),
        (100, 1, 10),
        (0.5, 1, 5),
        (4, 2, 2),  # of 20 batches in 10 windows
        (3, 2, 2),  # an optimizer step is never begun with a part of its batches
        (0.5, 2, 5),
        (1, 4, 1),
    ],
)
def test_training_is_cut_to_whole_optimizer_steps(limit: float | None, accumulate: int, windows: int | None) -> None:
    """Into however many parts a pipeline cuts each batch, and however many processes there are."""
    settings = config(limit_train_batches=limit, accumulate_grad_batches=accumulate).trainer
    for parts, procs in ((1, 1), (4, 1), (1, 4)):
        size = 4 * procs * accumulate
        plan = plan_batches(batch_size=4, global_batch_size=size, world_size=procs, accumulate=accumulate * parts)
        assert train_windows(settings, plan, size=10 * size - 1) == windows


@pytest.mark.parametrize(("batches", "left"), [(2, 24), (0.25, 12), (99, 50)])
def test_overfitting_trains_and_validates_on_the_same_few_global_batches(batches: float, left: int) -> None:
    given = Datasets(train=numbers(50), val=numbers(9), test=numbers(9))
    plan = plan_batches(batch_size=2, global_batch_size=None, world_size=3, accumulate=2)
    few = overfitted(given, config(overfit_batches=batches).trainer, plan)
    assert few.train is few.val
    assert few.test is None
    assert items(few.train) == list(range(left))
    assert overfitted(given, config().trainer, plan) is given


@pytest.mark.parametrize(("given", "batches"), [(True, 1), (1, 1), (3, 3)])
def test_a_fast_run_has_few_batches_of_everything_and_leaves_nothing(given: int | bool, batches: int) -> None:
    usual = config(fast_dev_run=given, max_epochs=7, max_steps=1, val_check_interval=1, check_val_every_n_epoch=None)
    usual = replace(usual, callbacks={"some": {"_target_": "framework.callbacks.Timer"}})
    assert usual.logger
    assert usual.checkpoint.enabled
    fast = shortened(usual)
    trainer = fast.trainer
    assert (trainer.limit_train_batches, trainer.limit_val_batches, trainer.limit_test_batches) == (batches,) * 3
    assert (trainer.max_epochs, trainer.max_steps, trainer.log_every_n_steps) == (1, None, 1)
    assert (trainer.val_check_interval, trainer.check_val_every_n_epoch) == (None, 1)
    assert (fast.checkpoint.enabled, fast.logger, fast.callbacks) == (False, {}, {})
    assert usual.checkpoint.enabled  # a new value was made
    usual = config(fast_dev_run=0)
    assert shortened(usual) is usual


@pytest.mark.parametrize(
    ("max_steps", "max_epochs", "steps"), [(None, 3, 18), (5, 3, 5), (100, 3, 18), (7, None, 7), (None, None, None)]
)
def test_total_steps_is_the_limit_that_comes_first(
    max_steps: int | None, max_epochs: int | None, steps: int | None
) -> None:
    settings = config(max_steps=max_steps, max_epochs=max_epochs).trainer
    assert total_steps(settings, steps_per_epoch=6) == steps


@pytest.mark.parametrize(
    ("to_exchange", "step", "found"), [(None, 7, 2), (1, 7, 1), (9, 7, 3), (2, 7, 2), (30, 10, 10), (30, 19, 1)]
)
def test_all_ranks_meet_in_an_exchange_or_a_log(to_exchange, step, found):
    strategy: Any = AsItIs()
    if to_exchange is not None:
        strategy.steps_to_exchange = to_exchange
    assert steps_to_meeting(strategy, config(log_every_n_steps=10).trainer, step=step) == found
