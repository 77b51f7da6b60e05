"""What a rank refuses to tune, and what it leaves out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from framework.config.parse import parse
from framework.errors import ConfigError
from framework.session import Rank
from framework.tune.running import dealt_anew, stripped
from framework.tune.trying import Alone
from tests.unit.config.raw import raw_config


class Spread(Alone):  # type: ignore[misc]
    forward_communicates = True


def rank(changes: dict[str, Any], *, strategy: Any = None) -> Rank:
    made: Any = object.__new__(Rank)
    vars(made).update(config=parse(raw_config(changes)), strategy=Alone() if strategy is None else strategy)
    found: Rank = made
    return found


def test_what_watches_keeps_or_ends_a_run_is_left_out() -> None:
    callbacks = {"stopping": {"_target_": "framework.callbacks.EarlyStopping", "monitor": "val/loss"}}
    schedule = {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 1}
    changes = {"callbacks": callbacks, "scheduler.schedule": schedule, "trainer.limit_train_batches": 3}
    given = rank(changes)
    left = stripped(given)
    assert (left.callbacks, left.scheduler.schedule, left.checkpoint.enabled) == ({}, None, False)
    assert left.trainer == replace(given.config.trainer, limit_train_batches=None)
    assert left.logger == given.config.logger


def test_a_spread_model_has_no_batch_of_one_rank_and_a_rate() -> None:
    with pytest.raises(ConfigError, match=r"strategy=spread leaves none with a whole.*\n.*tune.find_batch_size=false"):
        stripped(rank({}, strategy=Spread()))
    assert stripped(rank({"tune.find_batch_size": False}, strategy=Spread())).tune.find_lr


def test_an_optimizer_without_a_rate_has_none_to_find() -> None:
    optimizer = {"_target_": "builtins.dict"}
    with pytest.raises(ConfigError, match=r"builtins\.dict takes no keyword lr"):
        stripped(rank({"optimizer": optimizer}))
    assert stripped(rank({"optimizer": optimizer, "tune.find_lr": False})).tune.find_batch_size


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([1, 2])


def test_a_stream_cannot_be_dealt_anew() -> None:
    with pytest.raises(ConfigError, match=r"here a Stream, comes in one order only"):
        dealt_anew(Stream())
    samples = [1, 2]
    assert dealt_anew(samples) is samples
