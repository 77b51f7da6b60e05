"""Ranks that agree on a step to stop after, simulated; and what signals do meanwhile, in this process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework.launch.link import Link
from framework.launch.signals import STOP_SIGNALS
from framework.launch.stopping import StopRequest, interrupting, stoppable
from framework.pulse import Pulse, PulseReader


class FakeBoard:
    """The store's part in it: a counter and a step."""

    def __init__(self) -> None:
        self.count = 0
        self.step: int | None = None
        self.looks = 0

    def count_for_stop(self) -> int:
        self.count += 1
        return self.count

    def decide_stop(self, step: int) -> None:
        assert self.step is None, "decided twice"
        self.step = step

    def stop_step(self) -> int | None:
        self.looks += 1
        return self.step


class FakePulse:
    asked_to_stop = 0


@dataclass
class SimulatedRank:
    """begun, done: steps. sees_at: the number of steps after which it knows of the request."""

    pulse: FakePulse
    request: StopRequest
    sees_at: int
    begun: int = 0
    done: int = 0
    ended: bool = False
    stopped: bool = field(default=False)
    every: int | None = None  # steps from one exchange to the next, where they are several

    def begin(self, *, last_step: int) -> None:
        """What lies between two steps, then the next step up to where it needs the others."""
        if self.done >= self.sees_at:
            self.pulse.asked_to_stop = signal.SIGUSR1
        if self.done == last_step:
            self.ended = True
        elif self.done > 0 and self.request.pending and self.request.due(self.done, **self._meeting()):
            self.ended = self.stopped = True
        else:
            self.begun += 1

    def _meeting(self) -> dict[str, int]:
        return {} if self.every is None else {"meets_in": self.every - self.done % self.every}


def simulated_ranks(sees_at: list[int], *, every: int | None = None) -> list[SimulatedRank]:
    """One for each of these moments, at which it hears of the request; all look at one board."""
    board: Any = FakeBoard()
    ranks = []
    for moment in sees_at:
        pulse: Any = FakePulse()
        request = StopRequest(Link(pulse, lambda: board), world_size=len(sees_at))
        ranks.append(SimulatedRank(pulse, request, moment, every=every))
    return ranks


def advance(able: list[SimulatedRank], *, last_step: int, data: st.DataObject) -> None:
    """Let one of these ranks, which wait for nobody, do what it does next."""
    assert able, "deadlock"
    rank = able[data.draw(st.integers(0, len(able) - 1))]
    if rank.begun > rank.done:
        rank.done += 1
    else:
        rank.begin(last_step=last_step)


@settings(deadline=None)
@given(
    sees_at=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    last_step=st.integers(1, 24),
    lag=st.integers(0, 1),
    every=st.none() | st.integers(1, 7),
    data=st.data(),
)
def test_all_ranks_stop_after_the_same_step_however_they_are_interleaved(
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


def test_a_rank_counts_once_and_stops_looking_once_it_knows() -> None:
    board: Any = FakeBoard()
    pulse: Any = FakePulse()
    request = StopRequest(Link(pulse, lambda: board), world_size=2)
    pulse.asked_to_stop = signal.SIGTERM
    assert not request.due(4)
    assert not request.due(5)
    assert (board.count, board.looks) == (1, 2)
    board.decide_stop(7)
    assert not request.due(6)
    assert request.due(7)
    assert (board.count, board.looks) == (1, 3)


@contextmanager
def pulse_and_watcher() -> Iterator[tuple[Pulse, PulseReader]]:
    pulse = Pulse()
    watcher = PulseReader(os.dup(pulse.fd))
    try:
        yield pulse, watcher
    finally:
        watcher.close()
        pulse.close()


def no_board() -> Any:
    raise AssertionError("nothing has to be agreed on")


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_signals_reach_whoever_watches(number: signal.Signals) -> None:
    before = {each: signal.getsignal(each) for each in STOP_SIGNALS}
    with pulse_and_watcher() as (pulse, watcher):
        assert not watcher.read().is_stoppable
        with stoppable(Link(pulse, no_board)):
            assert watcher.read().is_stoppable
            for _ in range(2):
                os.kill(os.getpid(), number)
            assert watcher.read().wish == number
            assert pulse.asked_to_stop == 0  # that is the watcher's to say, on every node at once
        assert not watcher.read().is_stoppable
    assert {each: signal.getsignal(each) for each in STOP_SIGNALS} == before


@pytest.mark.parametrize("number", [each for each in STOP_SIGNALS if each != signal.SIGINT])
def test_a_rank_that_nobody_watches_handles_them_itself(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    """Except Ctrl-C, which stays Python's."""
    with pulse_and_watcher() as (pulse, _), stoppable(Link(pulse)):
        os.kill(os.getpid(), number)
        assert pulse.asked_to_stop == number
        os.kill(os.getpid(), signal.SIGTERM)  # schedulers send theirs more than once
        assert pulse.asked_to_stop == number
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    text = f"{number.name}: saving after this step, then stopping. Ctrl-C ends at once.\n"
    assert capfd.readouterr().err == text


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_if_nothing_is_saved_they_end_the_run_as_ctrl_c_does(number: signal.Signals) -> None:
    with pytest.raises(KeyboardInterrupt), interrupting():
        os.kill(os.getpid(), number)
