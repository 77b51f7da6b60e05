"""Ranks that agree on a step to stop after, simulated; and what signals do meanwhile, in this process."""

from __future__ import annotations

import os
import signal
import threading
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


def go_on(able: list[SimulatedRank], *, last_step: int, data: st.DataObject) -> None:
    """Let one of these ranks, which wait for nobody, do what it does next."""
    assert able, "the ranks wait for each other for ever"
    rank = able[data.draw(st.integers(0, len(able) - 1))]
    if rank.begun > rank.done:
        rank.done += 1
    else:
        rank.begin(last_step=last_step)


@settings(deadline=None)
@given(
    sees_at=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    last_step=st.integers(1, 14),
    lag=st.integers(0, 1),
    data=st.data(),
)
def test_all_ranks_stop_after_the_same_step_however_they_are_interleaved(
    sees_at: list[int], last_step: int, lag: int, data: st.DataObject
) -> None:
    """lag: how late a strategy uses gradients, in steps. A rank ends step n once all have begun n - lag."""
    world_size = len(sees_at)
    ranks = simulated_ranks(sees_at)
    while not all(rank.ended for rank in ranks):
        slowest = min(rank.begun for rank in ranks)
        able = [
            rank for rank in ranks if not rank.ended and (rank.begun == rank.done or slowest >= rank.done + 1 - lag)
        ]
        go_on(able, last_step=last_step, data=data)
    assert len({(rank.done, rank.stopped) for rank in ranks}) == 1
    if ranks[0].stopped:
        known = max(1, *sees_at)
        assert ranks[0].done <= known + (0 if world_size == 1 else 2)
        assert ranks[0].done < last_step
    else:
        assert ranks[0].done == last_step


@settings(deadline=None)
@given(
    sees_at=st.lists(st.integers(0, 12), min_size=2, max_size=6),
    last_step=st.integers(1, 24),
    every=st.integers(1, 7),
    data=st.data(),
)
def test_so_they_do_where_they_meet_every_few_steps_only(
    sees_at: list[int], last_step: int, every: int, data: st.DataObject
) -> None:
    """A rank ends a step in which all exchange something once all have begun it; others it ends alone."""
    ranks = simulated_ranks(sees_at, every=every)
    while not all(rank.ended for rank in ranks):
        slowest = min(rank.begun for rank in ranks)
        waits = [rank.begun > rank.done and rank.begun % every == 0 and slowest < rank.begun for rank in ranks]
        able = [rank for rank, is_waiting in zip(ranks, waits, strict=True) if not rank.ended and not is_waiting]
        go_on(able, last_step=last_step, data=data)
    assert len({(rank.done, rank.stopped) for rank in ranks}) == 1
    assert ranks[0].done < last_step if ranks[0].stopped else ranks[0].done == last_step


def test_a_rank_counts_once_and_looks_no_more_once_it_knows() -> None:
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


def test_alone_there_is_no_board_to_ask() -> None:
    pulse: Any = FakePulse()
    request = StopRequest(Link(pulse), world_size=1)
    pending = [request.pending]
    pulse.asked_to_stop = signal.SIGUSR1
    pending.append(request.pending)
    assert pending == [False, True]
    assert request.due(1)
    assert request.came_by == "SIGUSR1"
    pulse.asked_to_stop = signal.SIGINT
    assert request.came_by == "Ctrl-C"


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


@pytest.mark.parametrize("raised", [False, True])
def test_ignored_signals_stay_ignored_and_handlers_come_back(raised: bool) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with pulse_and_watcher() as (pulse, watcher):
            try:
                with stoppable(Link(pulse)):
                    os.kill(os.getpid(), signal.SIGHUP)
                    assert pulse.asked_to_stop == 0
                    if raised:
                        raise ZeroDivisionError
            except ZeroDivisionError:
                assert raised
            assert not watcher.read().is_stoppable
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_outside_of_the_main_thread_signals_are_left_alone() -> None:
    seen: list[tuple[bool, bool]] = []
    before = signal.getsignal(signal.SIGTERM)
    with pulse_and_watcher() as (pulse, watcher):

        def run() -> None:
            with stoppable(Link(pulse)):
                seen.append((watcher.read().is_stoppable, signal.getsignal(signal.SIGTERM) is before))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert seen == [(True, True)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_process_that_was_forked_meanwhile_is_as_without_the_handlers(number: signal.Signals) -> None:
    with pulse_and_watcher() as (pulse, watcher), stoppable(Link(pulse)):
        pid = os.fork()
        if pid == 0:
            try:
                os.kill(os.getpid(), number)
            except KeyboardInterrupt:
                os._exit(3)
            os._exit(4)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status == (3 if number == signal.SIGINT else -number)
        assert (pulse.asked_to_stop, watcher.read().wish) == (0, 0)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_where_nothing_is_saved_they_end_the_run_as_ctrl_c_does(number: signal.Signals) -> None:
    with pytest.raises(KeyboardInterrupt), interrupting():
        os.kill(os.getpid(), number)
