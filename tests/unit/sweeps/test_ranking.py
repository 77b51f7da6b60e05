"""Rows of trials: their means and intervals, their order, and which can be told apart from the best one."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest

from tests.helpers.internals import Row, TrialResult, best_trial, ranked_rows
from tests.unit.sweeps.trials import repeated, result

SEED = ("seed",)


def rows_of(scores: Mapping[str, Sequence[float]], *, mode: str = "max") -> dict[str, Row]:
    """Return the ranked rows by the override of their setting."""
    return {row.overrides[-1]: row for row in ranked_rows(repeated(scores), over=SEED, monitor="m", mode=mode)}


def test_a_row_is_what_differs_in_the_seed_only() -> None:
    trials = [
        result(0, "optimizer.lr=1", "seed=1", score=1.0),
        result(1, "seed=1", "optimizer.lr=2", score=2.0),
        result(2, "optimizer.lr=1", "seed=2", score=3.0),
        # Typed when the sweep was continued.
        result(3, "seed=2", "optimizer.lr=2", score=4.0),
        result(4, "+data.fold=1", "optimizer.lr=2", "seed=3", score=9.0),
    ]
    rows = ranked_rows(trials, over=SEED, monitor="m", mode="min")
    assert [[trial.number for trial in row.trials] for row in rows] == [[0, 2], [1, 3], [4]]
    assert [row.overrides[1:] for row in rows][:2] == [("optimizer.lr=1",), ("optimizer.lr=2",)]
    assert [row.mean for row in rows] == [2.0, 3.0, 9.0]
    with_folds = ranked_rows(trials, over=("seed", "data.fold"), monitor="m", mode="min")
    assert [[trial.number for trial in row.trials] for row in with_folds] == [[0, 2], [1, 3, 4]]


def test_a_row_has_mean_deviation_and_interval() -> None:
    (row,) = rows_of({"a=1": [0.91, 0.93, 0.92, 0.95, 0.94]}).values()
    # Of numpy and scipy: std(ddof=1), stats.t.interval(0.95, 4, mean, sd / sqrt(5)).
    assert row.mean == pytest.approx(0.93)
    assert row.sd == pytest.approx(0.015811388300841858)
    assert row.half_width == pytest.approx(0.93 - 0.9103675683852245)
    assert (row.n, row.rank, row.is_tied) == (5, 1, None)


def test_a_setting_tried_twice_counts_once() -> None:
    trials = [result(number, "a=1", "seed=1", score=score) for number, score in enumerate((0.5, 0.75))]
    (row,) = ranked_rows(trials, over=SEED, monitor="m", mode="max")
    assert (row.n, row.mean, row.half_width) == (1, 0.5, None)


@pytest.mark.parametrize(("mode", "order"), [("max", ["a=3", "a=1", "a=2"]), ("min", ["a=2", "a=1", "a=3"])])
def test_rows_are_ranked_in_the_direction_of_the_mode(mode: str, order: list[str]) -> None:
    rows = rows_of({"a=1": [2.0, 2.1], "a=2": [1.0, 1.1], "a=3": [3.0, 3.1]}, mode=mode)
    assert list(rows) == order
    assert [row.rank for row in rows.values()] == [1, 2, 3]


def test_equal_means_have_the_same_rank() -> None:
    rows = rows_of({"a=1": [1.0], "a=2": [3.0], "a=3": [2.0], "a=4": [3.0], "a=5": [2.0], "a=6": [0.0]})
    assert [(name, row.rank) for name, row in rows.items()] == [
        ("a=2", 1),
        ("a=4", 1),
        ("a=3", 3),
        ("a=5", 3),
        ("a=1", 5),
        ("a=6", 6),
    ]


def test_only_finished_trials_count() -> None:
    trials = [
        result(0, "a=1", "seed=1", status="failed", score=9.0),
        result(1, "a=1", "seed=2", status="pruned", score=9.0),
        result(2, "a=2", "seed=1", score=1.0),
        result(3, "a=2", "seed=2", score=float("nan")),
        result(4, "a=2", "seed=3", status="running", score=9.0),
        result(5, "a=2", "seed=4", score=2.0),
        result(6, "a=3", "seed=1", status="waiting"),
    ]
    rows = ranked_rows(trials, over=SEED, monitor="m", mode="max")
    assert [(row.overrides[1], row.rank, row.n, row.mean) for row in rows] == [
        ("a=2", 1, 2, 1.5),
        ("a=1", None, 0, None),
        ("a=3", None, 0, None),
    ]
    assert rows[1].half_width is None


def test_a_row_that_lacks_a_trial_is_behind_complete_ones() -> None:
    lucky = [result(0, "a=1", "seed=1", score=9.0), result(1, "a=1", "seed=2", status="failed")]
    complete = [result(2, "a=2", "seed=1", score=1.0), result(3, "a=2", "seed=2", score=2.0)]
    rows = ranked_rows([*lucky, *complete], over=SEED, monitor="m", mode="max")
    assert [(row.overrides[1], row.rank, row.mean) for row in rows] == [("a=2", 1, 1.5), ("a=1", None, 9.0)]
    best = best_trial(rows, mode="max")
    assert best is not None
    assert best.number == 3
    # Before any is complete, they say what is known.
    (row,) = ranked_rows(lucky, over=SEED, monitor="m", mode="max")
    assert (row.rank, row.n) == (1, 1)
    # A complete row of one seed lets no other in.
    single = result(4, "a=3", "seed=1", score=0.0)
    rows = ranked_rows([*lucky, *complete, single], over=SEED, monitor="m", mode="max")
    assert [(row.overrides[1], row.rank) for row in rows] == [("a=2", 1), ("a=3", 2), ("a=1", None)]
    # A failed trial more than the others have is no reason.
    more = [result(5, "a=1", "seed=3", score=8.0)]
    rows = ranked_rows([*lucky, *more, *complete], over=SEED, monitor="m", mode="max")
    assert [(row.overrides[1], row.rank) for row in rows] == [("a=1", 1), ("a=2", 2)]


@pytest.mark.parametrize(
    "spellings",
    [
        ("a=0.01", "a=1e-2", "+a=.01"),
        ("a=1", "a=1.0", "a=1e0"),
        ("a=[1,2]", "a=[1, 2]"),
        ("a=true", "a=True"),
        ("a=x", "a='x'"),
        # What a trial computes doesn't depend on these.
        ("a=1 trainer.progress=off", "a=1 logger=jsonl", "tags=[x] a=1"),
    ],
)
def test_one_value_is_one_setting_however_it_is_typed(spellings: Sequence[str]) -> None:
    trials = []
    for seed, texts in enumerate(spellings):
        overrides = [texts]
        if "[" not in texts or "tags" in texts:
            overrides = texts.split()
        trials.append(result(seed, *overrides, f"seed={seed}", score=1.0))
    (row,) = ranked_rows(trials, over=SEED, monitor="m", mode="max")
    assert row.n == len(spellings)


def test_values_that_look_alike_are_several_settings() -> None:
    texts = ("a=x", "a=1e-2x", "b=1", "a=1", "a='1'", "~a", "a=true", "a='True'")
    trials = [result(number, text, "seed=0", score=1.0) for number, text in enumerate(texts)]
    assert len(ranked_rows(trials, over=SEED, monitor="m", mode="max")) == len(texts)


def test_scores_of_different_metrics_are_not_ranked() -> None:
    trials = repeated({"a=1": [0.5, 0.1], "a=2": [0.2, 0.3]})
    rows = ranked_rows(trials, over=SEED, monitor=None, mode="max")
    assert [row.rank for row in rows] == [None, None]
    assert best_trial(rows, mode="max") is None


def test_the_best_trial_is_one_of_the_best_row() -> None:
    trials = repeated({"a=1": [0.5, 0.1], "a=2": [0.2, 0.3], "a=3": [0.4, 0.4]})
    for mode, number in (("max", 4), ("min", 2)):
        trial = best_trial(ranked_rows(trials, over=SEED, monitor="m", mode=mode), mode=mode)
        assert trial is not None
        assert trial.number == number
    unfinished: list[TrialResult] = [result(0, "a=1", status="failed", score=1.0)]
    assert best_trial(ranked_rows(unfinished, over=SEED, monitor="m", mode="max"), mode="max") is None
    assert best_trial([], mode="max") is None


# Noise


def test_two_rows_are_told_apart_by_a_paired_t_test() -> None:
    """The critical t of four degrees of freedom is 2.776, so the mean must be 2.776 · 1.5811 / √5 = 1.963."""
    effects = [100.0, -50.0, 0.0, 7.0, 30.0]
    for mean, is_tied in ((1.96, True), (1.97, False)):
        better = [effect + mean + noise for effect, noise in zip(effects, (-2, -1, 0, 1, 2), strict=True)]
        rows = rows_of({"a=1": effects, "a=2": better})
        assert [(name, row.is_tied) for name, row in rows.items()] == [("a=2", None), ("a=1", is_tied)]


def test_what_can_not_be_compared_is_not_called_tied() -> None:
    # One seed only.
    assert [row.is_tied for row in rows_of({"a=1": [1.0], "a=2": [2.0]}).values()] == [None, None]
    # No noise: the seed changes nothing.
    assert [row.is_tied for row in rows_of({"a=1": [1.0, 1.0], "a=2": [2.0, 2.0]}).values()] == [None, None]
    # One seed in common.
    trials = [
        result(0, "a=1", "seed=1", score=1.0),
        result(1, "a=1", "seed=2", score=1.1),
        result(2, "a=2", "seed=2", score=0.5),
        result(3, "a=2", "seed=3", score=0.6),
    ]
    assert [row.is_tied for row in ranked_rows(trials, over=SEED, monitor="m", mode="max")] == [None, None]


@pytest.mark.parametrize("huge", [0.8e154, 1e200, 1.7e308])
def test_huge_scores_are_ranked(huge: float) -> None:
    """Their variances are the largest numbers that there are, or larger."""
    rows = rows_of({"a=1": [huge, -huge, huge], "a=2": [1.0, 1.1, 1.2], "a=3": [2.0, 2.1, 2.2]}, mode="min")
    assert [row.rank for row in rows.values()] == [1, 2, 3]
    assert list(rows)[-1] == "a=1"
    rows = rows_of({"a=1": [huge, -huge], "a=2": [0.0, 0.0], "a=3": [-huge, huge]})
    assert [row.rank for row in rows.values()] == [1, 1, 1]


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What made-up tables are drawn from: the mean and the standard deviation of each row."""

    means: Sequence[float]
    deviations: Sequence[float]
    seeds: int = 5


@dataclass(frozen=True, kw_only=True)
class Found:
    """What ranking made of the tables."""

    # In which share of the tables the best row was told apart from one that is as good or better.
    wrong: float
    # Which share of the rows that are worse than all others was told apart from the best one.
    right: float


def simulate(truth: Truth, *, tables: int) -> Found:
    own = random.Random(0)
    num_worse = sum(mean < max(truth.means) for mean in truth.means)
    num_wrong = 0
    num_right = 0
    for _ in range(tables):
        effects = [own.gauss(0, 3) for _ in range(truth.seeds)]
        scores = {}
        for index, (mean, deviation) in enumerate(zip(truth.means, truth.deviations, strict=True)):
            scores[f"a={index}"] = [effect + own.gauss(mean, deviation) for effect in effects]
        rows = rows_of(scores)
        best = int(next(iter(rows)).removeprefix("a="))
        told_apart = [int(name.removeprefix("a=")) for name, row in rows.items() if row.is_tied is False]
        num_wrong += any(truth.means[index] >= truth.means[best] for index in told_apart)
        num_right += sum(truth.means[index] < truth.means[best] for index in told_apart)
    return Found(wrong=num_wrong / tables, right=num_right / max(1, num_worse * tables))


EQUAL = [0.0] * 8
SAME_NOISE = [1.0] * 8


def test_the_best_of_equal_rows_is_seldom_called_better() -> None:
    assert simulate(Truth(means=EQUAL, deviations=SAME_NOISE), tables=1000).wrong <= 0.065


@pytest.mark.parametrize(
    "truth",
    [
        Truth(means=EQUAL, deviations=[10.0, *SAME_NOISE[1:]]),
        Truth(means=EQUAL, deviations=[10.0] * 4 + [1.0] * 4),
        Truth(means=EQUAL, deviations=[0.1, *SAME_NOISE[1:]]),
        Truth(means=[0.0, 0.0, -2.0, -2.0, -2.0, -2.0, -2.0, -2.0], deviations=SAME_NOISE),
        Truth(means=[0.0] * 4 + [-2.0] * 4, deviations=SAME_NOISE),
        Truth(means=[0.0, 0.0], deviations=[1.0, 1.0]),
        Truth(means=EQUAL, deviations=SAME_NOISE, seeds=10),
    ],
    ids=str,
)
def test_an_equal_row_is_seldom_called_worse(truth: Truth) -> None:
    """Also if rows are not equally noisy, or others are worse."""
    assert simulate(truth, tables=1000).wrong <= 0.065


def test_a_better_row_is_told_apart() -> None:
    by_two = simulate(Truth(means=[2.0, *EQUAL[1:]], deviations=SAME_NOISE), tables=300)
    by_three = simulate(Truth(means=[3.0, *EQUAL[1:]], deviations=SAME_NOISE), tables=300)
    assert by_two.right >= 0.5
    assert by_three.right >= 0.9


def test_noisy_bad_rows_hide_no_difference_of_others() -> None:
    """As of learning rates that are too large: their noise isn't that of the good rows."""
    truth = Truth(means=[3.0, 0.0, 0.0, 0.0, 0.0, 0.0, -20.0, -50.0], deviations=[1.0] * 6 + [10.0, 10.0])
    assert simulate(truth, tables=300).right >= 0.3
