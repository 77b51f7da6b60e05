"""Ranks that agree on a step to stop after, simulated."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.internals import MonitorLink, StopRequest


class FakeRunStore:
    """The store's part in it: a counter and a step."""

    def __init__(self) -> None:
        self.count = 0
        self.step: int | None = None

    def add(self, key: str, amount: int) -> int:
        assert key == "stop/count"
        self.count += amount
        return self.count

    def set(self, key: str, step: int) -> None:
        assert key == "stop/step"
        assert self.step is None, "decided twice"
        self.step = step

    def get(self, key: str) -> int | None:
        assert key == "stop/step"
        return self.step


class FakeRankStatus:
    stop_signal = 0


@dataclass
class SimulatedRank:
    """begun, done: steps. sees_at: the number of steps after which it knows of the request."""

    rank_status: FakeRankStatus
    request: StopRequest
    sees_at: int
    begun: int = 0
    done: int = 0
    ended: bool = False
    stopped: bool = False
    # The steps between exchanges, if there are several.
    every: int | None = None

    def begin(self, *, last_step: int) -> None:
        """What lies between two steps, then the next step up to where it needs the others."""
        if self.done >= self.sees_at:
            self.rank_status.stop_signal = signal.SIGUSR1
        if self.done == last_step:
            self.ended = True
        elif self.done > 0 and self.request.pending and self.request.due(self.done, **self._meeting()):
            self.ended = self.stopped = True
        else:
            self.begun += 1

    def _meeting(self) -> dict[str, int]:
        return {} if self.every is None else {"steps_ahead": self.every - self.done % self.every}


def simulated_ranks(sees_at: list[int], *, every: int | None = None) -> list[SimulatedRank]:
    """One for each of these moments, at which it hears of the request; all look at one store."""
    run_store: Any = FakeRunStore()
    ranks = []
    for moment in sees_at:
        rank_status: Any = FakeRankStatus()
        request = StopRequest(MonitorLink(rank_status, lambda: run_store), world_size=len(sees_at))
        ranks.append(SimulatedRank(rank_status, request, moment, every=every))
    return ranks


def advance(able: list[SimulatedRank], *, last_step: int, data: st.DataObject) -> None:
    """Let one of these ranks, which wait for nobody, do what it does next."""
    assert able, "deadlock"
    rank = able[data.draw(st.integers(0, len(able) - 1))]
    if rank.begun > rank.done:
        rank.done += 1
    else:
        rank.begin(last_step=last_step)


@given(
    sees_at=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    last_step=st.integers(1, 24),
    lag=st.integers(0, 1),
    every=st.none() | st.integers(1, 7),
    data=st.data(),
)
def test_all_ranks_stop_after_the_same_step(
    sees_at: list[int], last_step: int, lag: int, every: int | None, data: st.DataObject
) -> None:
    """A rank ends step n once all have begun n - lag: a strategy may use gradients a step late. With `every`, they
    wait for each other only once in so many steps."""
    if every is not None and len(sees_at) == 1:
        every = None
    ranks = simulated_ranks(sees_at, every=every)
    while not all(rank.ended for rank in ranks):
        slowest = min(rank.begun for rank in ranks)
        able = [rank for rank in ranks if not rank.ended and not waits(rank, slowest, lag=lag, every=every)]
        advance(able, last_step=last_step, data=data)
    assert len({(rank.done, rank.stopped) for rank in ranks}) == 1
    if not ranks[0].stopped:
        assert ranks[0].done == last_step
        return
    assert ranks[0].done < last_step
    if every is None:
        assert ranks[0].done <= max(1, *sees_at) + (0 if len(sees_at) == 1 else 2)


def waits(rank: SimulatedRank, slowest: int, *, lag: int, every: int | None) -> bool:
    if rank.begun == rank.done:
        return False
    if every is not None:
        return rank.begun % every == 0 and slowest < rank.begun
    return slowest < rank.done + 1 - lag
