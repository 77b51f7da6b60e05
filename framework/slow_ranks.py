"""Which rank is slow, and in what: told by the times that ranks send along with what they log.

In each step the ranks wait for one another, so all take as long as the slowest; what differs is how much of it each
spends by itself. That is compared by kind: `data` (until the batch is there), `compute` (forward, backward and
optimizer, without the waiting for others in them) and `callbacks`. A rank's excess is its own time of a kind less the
median of the others', as a share of a whole step: by so much would steps be shorter, were it as fast as they are.

One slow step is no slow rank. Steps are judged together in stretches of half a second at least; a rank that exceeds by
10 % in four of the last five stretches is told, once for each kind. Named at the end are those told that exceeded in
most of the run's stretches, or still did in the last ones. Needs no torch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, NamedTuple, final

KINDS = ("data", "compute", "callbacks")
SLOW_SHARE = 0.1  # of a step
STRETCH_S = 0.5
LAST_STRETCHES, OF_THEM = 5, 4
CURVES_OF_RANKS = 8
"""There is a curve for each rank up to so many of them."""
_ALL = "all kinds"


class Spent(NamedTuple):
    """Where the time of one rank's steps went, in seconds of all of them together.

    step: the whole. data, compute, callbacks: its own, see above. waiting: for other ranks, where that is known. What
    is in none of them is neither its own nor waiting for certain.
    """

    steps: float = 0.0
    step: float = 0.0
    data: float = 0.0
    compute: float = 0.0
    callbacks: float = 0.0
    waiting: float = 0.0

    def own(self, kind: str) -> float:
        """Seconds a step."""
        seconds = self.data + self.compute + self.callbacks if kind == _ALL else getattr(self, kind)
        return float(seconds / self.steps)


@dataclass(frozen=True)
class SlowRank:
    """share: of a step, the excess in those stretches in which there was one, from first_step to last_step.

    throughout: from the beginning of the run to its end.
    """

    rank: int
    place: str
    kind: str
    share: float
    first_step: int
    last_step: int
    throughout: bool

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> SlowRank:
        return SlowRank(**plain)

    def __str__(self) -> str:
        when = "" if self.throughout else f" (steps {self.first_step:,} to {self.last_step:,})"
        return f"rank {self.rank} ({self.place}) is {self.share * 100:.0f} % slower in {self.kind}{when}"


@dataclass
class _Exceeding:
    """How often a rank has exceeded in a kind, by how much in all, and when: by number of the stretch, and by step."""

    stretches: int = 0
    shares: float = 0.0
    first: tuple[int, int] = (0, 0)
    last: tuple[int, int] = (0, 0)


@final
class SlowRanks:
    """Gathers the times of all ranks, and judges them. Every rank has one; what they are told is the same.

    news: what the last `note` found that nobody was told of yet.
    """

    def __init__(self, *, rank: int, world_size: int) -> None:
        self._rank = rank
        self._places = [""] * world_size
        self._from_step = 0
        self.news: str | None = None
        self._stretch = [Spent()] * world_size
        self._stretches = 0
        self._last: deque[dict[tuple[str, int], float]] = deque(maxlen=LAST_STRETCHES)
        self._exceeding: dict[tuple[str, int], _Exceeding] = {}
        self._told: set[tuple[str, int]] = set()

    def start(self, places: Sequence[str], *, step: int) -> None:
        """places: of each rank, its host and devices. step: steps done before."""
        self._places, self._from_step = list(places), step

    def row(self, own: Spent) -> list[float]:
        """This rank's numbers at their place among those of all ranks: what is added up over ranks for `note`."""
        numbers = [0.0] * (len(Spent._fields) * len(self._places))
        begin = self._rank * len(own)
        numbers[begin : begin + len(own)] = own
        return numbers

    def note(self, numbers: Sequence[float], *, step: int) -> dict[str, float]:
        """Take in the times since the last log, `step` steps being done; gives what there is to log of them.

        Nothing where a rank doesn't know them.
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
            self._stretch, self._from_step = [Spent()] * len(table), step
        return values | _skew(table)

    def found(self) -> list[SlowRank]:
        """Who is to be named now, the worst first; see the top of this module."""
        named = [
            key
            for key in self._told
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
        new = {key for key in found if self._times_of_last(key) >= OF_THEM} - self._told
        if new:
            self._told |= new
            self.news = self._announced(sorted(new, key=lambda key: -found[key]))

    def _announced(self, new: Sequence[tuple[str, int]]) -> str:
        worst, *others = map(self._named, new)
        more = f", and {len(others)} more such" if others else ""
        told = str(worst).partition(" (steps")[0]
        return f"{told[0].upper()}{told[1:]} than the others, since step {worst.first_step:,}{more}"

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
    """Of each rank: its own time less the median of the others', as a share of the median step."""
    step_s = median(each.step / each.steps for each in table)
    own = [each.own(kind) for each in table]
    in_order = sorted(own)
    return [(mine - _median_of_others(in_order, mine)) / step_s for mine in own]


def _median_of_others(in_order: Sequence[float], mine: float) -> float:
    """Without sorting anew for each rank of thousands."""
    place, count = bisect_left(in_order, mine), len(in_order) - 1
    middle = ((count - 1) // 2, count // 2)
    return sum(in_order[index + (index >= place)] for index in middle) / 2


def _mean_share(table: Sequence[Spent], kind: str) -> float:
    shares: list[float] = [getattr(each, kind) / each.step for each in table]
    return sum(shares) / len(shares)


def _skew(table: Sequence[Spent]) -> dict[str, float]:
    """How far ranks' own times are apart: of the slowest rank, and of each where they are few."""
    shares = excesses(table, _ALL)
    worst = max(range(len(shares)), key=shares.__getitem__)
    values = {"skew/worst": shares[worst]}
    if shares[worst] >= SLOW_SHARE:
        values["skew/slowest_rank"] = float(worst)
    if len(table) <= CURVES_OF_RANKS:
        values |= {f"skew/rank_{rank}": share for rank, share in enumerate(shares)}
    return values
