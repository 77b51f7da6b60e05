"""Find ranks that are slower than the others, and in what, from the times that ranks exchange when they log.

Ranks wait for each other in each step, so all steps take as long as the slowest rank's. What differs is a rank's own
time: `data` (until the batch is there), `compute` (forward, backward and optimizer, without waiting for others) and
`callbacks`. A rank's excess is its own time of a kind minus the median of the others', as a share of the step: steps
would be shorter by that much if the rank were as fast as the others.

One slow step makes no slow rank. Steps are judged in stretches of at least half a second. A rank whose excess is at
least 10 % in four of the last five stretches is reported, once for each kind. At the end, a reported rank is named if
it exceeded in most stretches of the run, or still did in the last ones. Needs no torch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, final

KINDS = ("data", "compute", "callbacks")
ALL_KINDS = "all kinds"
STRETCH_S = 0.5
# The least excess that makes a rank slow in a stretch, as a share of a step.
SLOW_SHARE = 0.1
# A rank is reported if it was slow in this many of the last stretches.
LAST_STRETCHES = 5
SLOW_STRETCHES = 4
# With up to this many ranks, each one gets a curve.
CURVES_OF_RANKS = 8


class RankTimes(NamedTuple):
    """How long one rank's steps took, in seconds summed over the steps."""

    # The number of steps.
    steps: float = 0.0
    total: float = 0.0
    data: float = 0.0
    compute: float = 0.0
    callbacks: float = 0.0
    # For other ranks; 0 if that isn't known.
    waiting: float = 0.0

    def own_s(self, kind: str) -> float:
        """Return the rank's own seconds per step of a kind, or of ALL_KINDS."""
        if kind == ALL_KINDS:
            seconds = self.data + self.compute + self.callbacks
        else:
            seconds = getattr(self, kind)
        return float(seconds / self.steps)


@dataclass(frozen=True)
class SlowRank:
    """A rank that is named slow."""

    rank: int
    # Host and devices.
    place: str
    kind: str
    # The mean excess of the stretches in which the rank was slow, from first_step to last_step.
    share: float
    first_step: int
    last_step: int
    # From the beginning of the run to its end.
    throughout: bool

    def __str__(self) -> str:
        text = f"rank {self.rank} ({self.place}) is {self.share * 100:.0f} % slower in {self.kind}"
        if not self.throughout:
            text += f" (steps {self.first_step:,} to {self.last_step:,})"
        return text


class _Case(NamedTuple):
    """What is judged: one rank in one kind."""

    kind: str
    rank: int


@dataclass
class _SlowStretches:
    """The stretches in which a rank was slow in a kind."""

    # The number of the first one, counted from 1, and its first step.
    first: int
    first_step: int
    # The number of the last one, and its last step.
    last: int = 0
    last_step: int = 0
    count: int = 0
    # The sum of the excesses.
    shares: float = 0.0


@final
class SlowRanks:
    """Judges the times of all ranks. Every rank has one, with the same input."""

    def __init__(self, *, rank: int, world_size: int) -> None:
        self._rank = rank
        self._places = [""] * world_size
        # What the last `note` found and no earlier one reported.
        self.news: str | None = None
        # The times since the present stretch began, of each rank, and the steps done when it began.
        self._stretch = [RankTimes()] * world_size
        self._from_step = 0
        # The number of whole stretches, and the excesses of the ranks that were slow in the last ones.
        self._num_stretches = 0
        self._last_stretches: deque[dict[_Case, float]] = deque(maxlen=LAST_STRETCHES)
        self._slow_stretches: dict[_Case, _SlowStretches] = {}
        self._reported: set[_Case] = set()

    def start(self, places: Sequence[str], *, step: int) -> None:
        """Set host and devices of each rank, and the steps done before."""
        self._places = list(places)
        self._from_step = step

    def row(self, own: RankTimes) -> list[float]:
        """Return this rank's times at its place in a vector for all ranks, to be summed over ranks for `note`."""
        numbers = [0.0] * (len(own) * len(self._places))
        begin = self._rank * len(own)
        numbers[begin : begin + len(own)] = own
        return numbers

    def note(self, numbers: Sequence[float], *, step: int) -> dict[str, float]:
        """Take the times since the last log, after `step` steps, and return the values to log.

        Empty if a rank doesn't know its times.
        """
        width = len(RankTimes._fields)
        table = [RankTimes(*numbers[begin : begin + width]) for begin in range(0, len(numbers), width)]
        self.news = None
        if not all(times.steps and times.total for times in table):
            is_stretch_empty = not any(times.steps for times in self._stretch)
            if is_stretch_empty:
                self._from_step = step
            return {}

        values = {"time/data": _mean_share(table, "data")}
        if len(table) == 1:
            return values
        if any(times.waiting for times in table):
            values["time/waiting"] = _mean_share(table, "waiting")
        values |= _skew(table)

        self._stretch = [_add(before, times) for before, times in zip(self._stretch, table, strict=True)]
        if median(times.total for times in self._stretch) >= STRETCH_S:
            self._judge_stretch(step)
            self._stretch = [RankTimes()] * len(table)
            self._from_step = step
        return values

    def found(self) -> list[SlowRank]:
        """Return the ranks to name at the end, the slowest first."""
        cases = []
        for case in self._reported:
            in_most_stretches = self._slow_stretches[case].count > self._num_stretches / 2
            if in_most_stretches or self._is_slow_lately(case):
                cases.append(case)
        cases.sort(key=lambda case: (-self._slow_stretches[case].shares, case))
        return [self._slow_rank(case) for case in cases]

    def _judge_stretch(self, step: int) -> None:
        """Note who was slow in the stretch that ends after `step` steps; set `news` if someone is to be reported."""
        self._num_stretches += 1
        slow: dict[_Case, float] = {}
        for kind in KINDS:
            for rank, share in enumerate(excesses(self._stretch, kind)):
                if share >= SLOW_SHARE:
                    slow[_Case(kind, rank)] = share
        self._last_stretches.append(slow)

        for case, share in slow.items():
            if case not in self._slow_stretches:
                self._slow_stretches[case] = _SlowStretches(first=self._num_stretches, first_step=self._from_step + 1)
            stretches = self._slow_stretches[case]
            stretches.last = self._num_stretches
            stretches.last_step = step
            stretches.count += 1
            stretches.shares += share

        to_report = [case for case in slow if case not in self._reported and self._is_slow_lately(case)]
        if to_report:
            self._reported.update(to_report)
            to_report.sort(key=lambda case: (-slow[case], case))
            self.news = self._announcement(to_report)

    def _announcement(self, cases: Sequence[_Case]) -> str:
        """Return a sentence about the first of these cases, which is the worst."""
        worst = self._slow_rank(cases[0])
        who = str(worst).partition(" (steps")[0]
        text = f"{who[0].upper()}{who[1:]} than the others, since step {worst.first_step:,}"
        if len(cases) > 1:
            text += f", and {len(cases) - 1} more such"
        return text

    def _slow_rank(self, case: _Case) -> SlowRank:
        stretches = self._slow_stretches[case]
        from_the_beginning = stretches.first <= LAST_STRETCHES
        to_the_end = stretches.last > self._num_stretches - LAST_STRETCHES
        return SlowRank(
            rank=case.rank,
            place=self._places[case.rank],
            kind=case.kind,
            share=stretches.shares / stretches.count,
            first_step=stretches.first_step,
            last_step=stretches.last_step,
            throughout=from_the_beginning and to_the_end,
        )

    def _is_slow_lately(self, case: _Case) -> bool:
        return sum(case in slow for slow in self._last_stretches) >= SLOW_STRETCHES


def excesses(table: Sequence[RankTimes], kind: str) -> list[float]:
    """Return each rank's own time of a kind minus the median of the others', as a share of the median step."""
    step_s = median(times.total / times.steps for times in table)
    own = [times.own_s(kind) for times in table]
    ascending = sorted(own)
    return [(own_s - _median_of_others(ascending, own_s)) / step_s for own_s in own]


def _median_of_others(ascending: Sequence[float], own_s: float) -> float:
    """Return the median without one element, `own_s`, without sorting again for each of thousands of ranks."""
    place = bisect_left(ascending, own_s)
    num_others = len(ascending) - 1
    middle = [(num_others - 1) // 2, num_others // 2]
    # The others behind the one left out are one place further back.
    values = [ascending[index + 1] if index >= place else ascending[index] for index in middle]
    return sum(values) / 2


def _add(before: RankTimes, times: RankTimes) -> RankTimes:
    return RankTimes(*(first + second for first, second in zip(before, times, strict=True)))


def _mean_share(table: Sequence[RankTimes], field: str) -> float:
    shares: list[float] = [getattr(times, field) / times.total for times in table]
    return sum(shares) / len(shares)


def _skew(table: Sequence[RankTimes]) -> dict[str, float]:
    """Return the excess in all kinds together: of the slowest rank, and of each if there are few."""
    shares = excesses(table, ALL_KINDS)
    worst = max(shares)
    values = {"skew/worst": worst}
    if worst >= SLOW_SHARE:
        values["skew/slowest_rank"] = float(shares.index(worst))
    if len(table) <= CURVES_OF_RANKS:
        for rank, share in enumerate(shares):
            values[f"skew/rank_{rank}"] = share
    return values
