"""Which trials are best, and how sure that is.

A row is one setting: the trials that differ in nothing but the keys of `sweep.over`, such as the seed. Rows are ranked
by the mean of their finished trials; `differences` says which of them can be told apart from the best one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from framework.config.hydra_compose import value_of
from framework.config.overrides import key_of
from framework.sweeps.differences import Block, Scores, told_apart
from framework.sweeps.folder import decides_what_runs
from framework.sweeps.results import TrialResult
from framework.sweeps.student_t import two_sided_quantile

_OUTSIDE_INTERVAL = 0.05


@dataclass(frozen=True, kw_only=True)
class Row:
    """The trials of one setting, and the mean of their scores."""

    # In the order of their numbers.
    trials: tuple[TrialResult, ...]
    # What all of them have.
    overrides: tuple[str, ...]
    # Of the trials that have finished.
    scores: Scores = field(default_factory=dict)
    # From 1; equal means have the same rank. None if the row isn't ranked.
    rank: int | None = None
    # True: within noise of the best row. False: told apart from it. None: it is the best row, or it can't be compared
    # with that, because fewer than two values of `sweep.over` have finished in both.
    is_tied: bool | None = None

    @property
    def n(self) -> int:
        """Return the number of scores that the mean is of."""
        return len(self.scores)

    @property
    def is_complete(self) -> bool:
        """Return True if every trial has finished with a score."""
        return all(trial.final_score is not None for trial in self.trials)

    @property
    def mean(self) -> float | None:
        """Return the mean of the scores; None if there are none."""
        if not self.scores:
            return None
        return sum(self.scores.values()) / self.n

    @property
    def sd(self) -> float | None:
        """Return the sample standard deviation of the scores; None if there are fewer than two."""
        mean = self.mean
        if mean is None or self.n < 2:
            return None
        squares = [(score - mean) * (score - mean) for score in self.scores.values()]
        return math.sqrt(sum(squares) / (self.n - 1))

    @property
    def half_width(self) -> float | None:
        """Return half the width of the mean's 95 % interval, by Student's t; None for fewer than two scores."""
        if self.sd is None:
            return None
        return two_sided_quantile(_OUTSIDE_INTERVAL, df=self.n - 1) * self.sd / math.sqrt(self.n)


def ranked_rows(results: Sequence[TrialResult], *, over: Collection[str], monitor: str | None, mode: str) -> list[Row]:
    """Return the rows, the best one first. Those that aren't ranked come last, in the order of their trials.

    A row that lacks trials is ranked if it has as many finished ones as any complete row: else, one lucky seed would
    beat the mean of five.

    Args:
        over: the keys of `sweep.over`.
        monitor: the metric that all scores are of. None: they can't be compared, and no row is ranked.
        mode: `min` or `max`: which scores are better.
    """
    rows = _rows(results, over=over)
    if monitor is None:
        return rows
    enough = max((row.n for row in rows if row.is_complete), default=1)
    with_mean = []
    for row in rows:
        if row.mean is not None and (row.is_complete or row.n >= enough):
            with_mean.append((row.mean, row))
    with_mean.sort(key=lambda item: item[0], reverse=mode == "max")
    is_told_apart = told_apart([row.scores for _, row in with_mean], best=0)

    ranked: list[Row] = []
    rank = 1
    mean_of_rank = None
    for index, (mean, row) in enumerate(with_mean):
        if mean != mean_of_rank:
            rank = index + 1
            mean_of_rank = mean
        is_tied = None
        if index in is_told_apart:
            is_tied = not is_told_apart[index]
        ranked.append(replace(row, rank=rank, is_tied=is_tied))
    with_rank = [row for _, row in with_mean]
    return ranked + [row for row in rows if row not in with_rank]


def best_trial(rows: Sequence[Row], *, mode: str) -> TrialResult | None:
    """Return the best trial of the best row; None if no row is ranked. rows: as `ranked_rows`."""
    if not rows or rows[0].rank is None:
        return None
    scored: list[tuple[float, TrialResult]] = []
    for trial in rows[0].trials:
        if trial.final_score is not None:
            scored.append((trial.final_score, trial))
    choose = max if mode == "max" else min
    _, trial = choose(scored, key=lambda item: item[0])
    return trial


def _rows(results: Sequence[TrialResult], *, over: Collection[str]) -> list[Row]:
    """Return the rows in the order of their first trials."""
    trials: dict[frozenset[str], list[TrialResult]] = {}
    for result in results:
        _, setting = _split(result.overrides, over=over)
        # Values that are added to a sweep later may come in another order, and be typed in another way.
        key = frozenset(_meaning(text) for text in setting if decides_what_runs(key_of(text)))
        trials.setdefault(key, []).append(result)

    rows = []
    for row_trials in trials.values():
        row_trials.sort(key=lambda trial: trial.number)
        scores: dict[Block, float] = {}
        for trial in row_trials:
            block, setting = _split(trial.overrides, over=over)
            if trial.final_score is not None:
                # A search may try a setting twice, which says nothing new.
                scores.setdefault(block, trial.final_score)
        rows.append(Row(trials=tuple(row_trials), overrides=setting, scores=scores))
    return rows


@cache
def _meaning(override: str) -> str:
    """Return the same text for overrides that mean the same, such as `lr=0.01` and `+lr=1e-2`."""
    value = value_of(override)
    if type(value) is float and value.is_integer():
        value = int(value)
    sign = "~" if override.startswith("~") else ""
    return f"{sign}{key_of(override)}={value!r}"


def _split(overrides: Sequence[str], *, over: Collection[str]) -> tuple[Block, tuple[str, ...]]:
    """Return the overrides of the keys of `sweep.over`, sorted, and the others in their order."""
    block = sorted(_meaning(text) for text in overrides if key_of(text) in over)
    setting = tuple(text for text in overrides if key_of(text) not in over)
    return tuple(block), setting
