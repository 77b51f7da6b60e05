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
SLOW_SHARE = 0.1  # of a step
STRETCH_S = 0.5
LAST_STRETCHES = 5
OF_THEM = 4
CURVES_OF_RANKS = 8
"""Up to this many ranks get a curve each."""
_ALL = "all kinds"


class Spent(NamedTuple):
    """How long one rank's steps took, in seconds summed over the steps."""

    steps: float = 0.0  # how many
    step: float = 0.0  # all of it
    data: float = 0.0
    compute: float = 0.0
    callbacks: float = 0.0
    waiting: float = 0.0  # for other ranks, if that is known; the rest may be either

    def own(self, kind: str) -> float:
        """Return the rank's own seconds per step."""
        seconds = self.data + self.compute + self.callbacks if kind == _ALL else getattr(self, kind)
        return float(seconds / self.steps)


@dataclass(frozen=True)
class SlowRank:
    """A rank that is named slow."""

    rank: int
    place: str  # host and devices
    kind: str
    share: float  # the mean excess of the stretches that had one, from first_step to last_step
    first_step: int
    last_step: int
    throughout: bool  # from the beginning of the run to its end

    def __str__(self) -> str:
        when = "" if self.throughout else f" (steps {self.first_step:,} to {self.last_step:,})"
        return f"rank {self.rank} ({self.place}) is {self.share * 100:.0f} % slower in {self.kind}{when}"


@dataclass
class _Exceeding:
    """The stretches in which a rank's excess in a kind was SLOW_SHARE or more."""

    stretches: int = 0
    shares: float = 0.0  # summed
    first: tuple[int, int] = (0, 0)  # number of the stretch, and step
    last: tuple[int, int] = (0, 0)


@final
class SlowRanks:
    """Judges the times of all ranks. Every rank has one, with the same input."""

    def __init__(self, *, rank: int, world_size: int) -> None:
        self._rank = rank
        self._places = [""] * world_size
        self._from_step = 0
        self.news: str | None = None  # what the last `note` found and no earlier one reported
        self._stretch = [Spent()] * world_size
        self._stretches = 0
        self._last: deque[dict[tuple[str, int], float]] = deque(maxlen=LAST_STRETCHES)
        self._exceeding: dict[tuple[str, int], _Exceeding] = {}
        self._reported: set[tuple[str, int]] = set()

    def start(self, places: Sequence[str], *, step: int) -> None:
        """Set host and devices of each rank, and the steps done before."""
        self._places = list(places)
        self._from_step = step

    def row(self, own: Spent) -> list[float]:
        """Return this rank's times at its place in a vector for all ranks, to be summed over ranks for `note`."""
        numbers = [0.0] * (len(Spent._fields) * len(self._places))
        begin = self._rank * len(own)
        numbers[begin : begin + len(own)] = own
        return numbers

    def note(self, numbers: Sequence[float], *, step: int) -> dict[str, float]:
        """Take the times since the last log, after `step` steps, and return the values to log.

        Empty if a rank doesn't know its times.
        """
        width = len(Spent._fields)
        table = [Spent(*numbers[begin : begin + width]) for begin in range(0, len(numbers), width)]
        self.news = None
        if not all(each.steps and each.step for each in table):
            if not any(each.steps for each in self._stretch):
                self._from_step = step
            return {}
        values = {"time/data": _mean_share(table, "data")}
        if len(table) == 1:
            return values
        if any(each.waiting for each in table):
            values["time/waiting"] = _mean_share(table, "waiting")
        self._stretch = [Spent(*map(sum, zip(*pair, strict=True))) for pair in zip(self._stretch, table, strict=True)]
        if median(each.step for each in self._stretch) >= STRETCH_S:
            self._judge(step)
            self._stretch = [Spent()] * len(table)
            self._from_step = step
        return values | _skew(table)

    def found(self) -> list[SlowRank]:
        """Return the ranks to name at the end, the slowest first."""
        named = [
            key
            for key in self._reported
            if self._exceeding[key].stretches > self._stretches / 2 or self._times_of_last(key) >= OF_THEM
        ]
        return [self._named(key) for key in sorted(named, key=lambda key: (-self._exceeding[key].shares, key))]

    def _judge(self, step: int) -> None:
        found = {
            (kind, rank): share
            for kind in KINDS
            for rank, share in enumerate(excesses(self._stretch, kind))
            if share >= SLOW_SHARE
        }
        self._last.append(found)
        self._stretches += 1
        for key, share in found.items():
            seen = self._exceeding.setdefault(key, _Exceeding(first=(self._stretches, self._from_step + 1)))
            seen.stretches += 1
            seen.shares += share
            seen.last = self._stretches, step
        new = {key for key in found if self._times_of_last(key) >= OF_THEM} - self._reported
        if new:
            self._reported |= new
            self.news = self._announced(sorted(new, key=lambda key: -found[key]))

    def _announced(self, new: Sequence[tuple[str, int]]) -> str:
        worst, *others = map(self._named, new)
        more = f", and {len(others)} more such" if others else ""
        text = str(worst).partition(" (steps")[0]
        return f"{text[0].upper()}{text[1:]} than the others, since step {worst.first_step:,}{more}"

    def _named(self, key: tuple[str, int]) -> SlowRank:
        kind, rank = key
        seen = self._exceeding[key]
        return SlowRank(
            rank=rank,
            place=self._places[rank],
            kind=kind,
            share=seen.shares / seen.stretches,
            first_step=seen.first[1],
            last_step=seen.last[1],
            throughout=seen.first[0] <= LAST_STRETCHES and seen.last[0] > self._stretches - LAST_STRETCHES,
        )

    def _times_of_last(self, key: tuple[str, int]) -> int:
        return sum(key in each for each in self._last)


def excesses(table: Sequence[Spent], kind: str) -> list[float]:
    """Return each rank's own time minus the median of the others', as a share of the median step."""
    step_s = median(each.step / each.steps for each in table)
    own = [each.own(kind) for each in table]
    in_order = sorted(own)
    return [(mine - _median_of_others(in_order, mine)) / step_s for mine in own]


def _median_of_others(in_order: Sequence[float], mine: float) -> float:
    """Return the median of the others' times without sorting them again for each of thousands of ranks."""
    place = bisect_left(in_order, mine)
    count = len(in_order) - 1
    middle = ((count - 1) // 2, count // 2)
    return sum(in_order[index + (index >= place)] for index in middle) / 2


def _mean_share(table: Sequence[Spent], kind: str) -> float:
    shares: list[float] = [getattr(each, kind) / each.step for each in table]
    return sum(shares) / len(shares)


def _skew(table: Sequence[Spent]) -> dict[str, float]:
    """Return the excess in all kinds together: of the slowest rank, and of each if there are few."""
    shares = excesses(table, _ALL)
    worst = max(range(len(shares)), key=shares.__getitem__)
    values = {"skew/worst": shares[worst]}
    if shares[worst] >= SLOW_SHARE:
        values["skew/slowest_rank"] = float(worst)
    if len(table) <= CURVES_OF_RANKS:
        values |= {f"skew/rank_{rank}": share for rank, share in enumerate(shares)}
    return values
