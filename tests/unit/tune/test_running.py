"""What a rank refuses to tune, and what it leaves out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from framework.config.parse import parse
from framework.errors import ConfigError, RunError
from framework.session import Rank
from framework.strategies.single import AsItIs
from framework.tune import running
from framework.tune.dealing import Dealing
from framework.tune.running import _Search, dealt_anew, stripped
from framework.tune.trying import Tried
from tests.unit.config.raw import raw_config
from tests.unit.simulated_ranks import cpu_context


class Spread(AsItIs):
    forward_communicates = True


def rank(changes: dict[str, Any], *, strategy: Any = None) -> Rank:
    made: Any = object.__new__(Rank)
    vars(made).update(config=parse(raw_config(changes)), strategy=AsItIs() if strategy is None else strategy)
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
    assert left.logger == {}, "each trainer would open its files"


def test_a_spread_model_has_no_batch_of_one_rank_and_a_rate() -> None:
    with pytest.raises(ConfigError, match=r"strategy=spread leaves none with a whole.*\n.*tune.find_batch_size=false"):
        stripped(rank({}, strategy=Spread()))
    assert stripped(rank({"tune.find_batch_size": False}, strategy=Spread())).tune.find_lr


def test_an_optimizer_without_a_rate_has_none_to_find() -> None:
    optimizer = {"_target_": "builtins.dict"}
    with pytest.raises(ConfigError, match=r"builtins\.dict takes no keyword lr"):
        stripped(rank({"optimizer": optimizer}))
    assert stripped(rank({"optimizer": optimizer, "tune.find_lr": False})).tune.find_batch_size


def test_who_hangs_in_a_trial_is_told_by_the_group_that_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class AskedError(Exception):
        pass

    def side_group(_timeout_s: float, *, is_counted: bool = False) -> None:
        raise AskedError(is_counted)

    monkeypatch.setattr(running, "build_trainer", lambda *_: None)
    monkeypatch.setattr(running, "side_group", side_group)
    two = rank({}, strategy=AsItIs())
    vars(two).update(context=SimpleNamespace(world_size=2))
    for each in fields(Rank):
        vars(two).setdefault(each.name, None)
    loader: Any = None
    with pytest.raises(AskedError, match="True"):
        running._largest_batch(two, loader, Dealing(2, 1, None, 8), averages=0)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([1, 2])


def test_a_stream_cannot_be_dealt_anew() -> None:
    with pytest.raises(ConfigError, match=r"here a Stream, comes in one order only"):
        dealt_anew(Stream())
    samples = [1, 2]
    assert dealt_anew(samples) is samples


class Limited:
    """Trials of a second each in which at most `most` samples fit, and fewer than `least` are no use to the model."""

    def __init__(self, *, most: int, least: int = 1) -> None:
        self.most, self.least = most, least
        self.tried: list[int] = []

    def try_size(self, size: int) -> Tried:
        self.tried.append(size)
        if size < self.least:
            raise ValueError("Expected more than 1 value per channel when training")
        return Tried(None if size <= self.most else "took 2 B of 1 B", 2, 1.0)


def search(trials: Limited, dealing: Dealing) -> _Search:
    made = rank({})
    vars(made).update(context=cpu_context())
    held: Any = trials
    return _Search(made, held, dealing, None, noted=[])


def test_sizes_that_are_dealt_alike_are_one(capsys: pytest.CaptureFixture[str]) -> None:
    trials = Limited(most=70)
    found = search(trials, Dealing(2, 1, 400, 1000))
    assert [found.fits(size) for size in (72, 80, 67, 100, 110)] == [True, True, True, False, False]
    assert trials.tried == [67, 100]
    assert [(note["batch_size"], note["samples_per_s"]) for note in found.noted] == [(67, 268.0), (100, None)]
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [["batch", "67"], ["batch", "100"]]


def test_the_rate_is_of_samples_that_there_are() -> None:
    found = search(Limited(most=1000), Dealing(2, 1, 1600, 5))
    assert [found.fits(800), found.noted[0]["batch_size"], found.noted[0]["samples_per_s"]] == [True, 3, 5.0]


def test_an_error_of_the_smallest_does_not_hide_that_larger_ones_took_too_much() -> None:
    found = search(Limited(most=0, least=2), Dealing(1, 1, None, 1000))
    assert not found.fits(2)
    with pytest.raises(
        RunError, match=r"Not even a batch of 2 fits: rank 0: took 2 B of 1 B\nAnd with 1 the model"
    ) as at:
        found.fits(1)
    assert "ValueError: Expected more than 1 value per channel" in str(at.value)


def test_an_error_after_something_fitted_passes() -> None:
    found = search(Limited(most=10, least=4), Dealing(1, 1, None, 1000))
    assert found.fits(4)
    assert not found.fits(12)
    with pytest.raises(ValueError, match="more than 1 value"):
        found.fits(3)
