"""What a rank's steps are made of, by clocks that the tests move."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.internals import Clock, RankPhase, RankTimes, StepTimer
from tests.unit.small_trainer import Marks


class Host:
    """Moves when somebody works."""

    def __init__(self) -> None:
        self.time = 0

    def now(self) -> int:
        return self.time


def work(clock: Host, time: int) -> None:
    clock.time += time


def step(watch: StepTimer, clock: Host, number: int, *, data: int = 3, waiting: int = 20) -> None:
    """One of 1 + 2 for the forward and backward, 20 of waiting, 4 for the optimizer, 5 for callbacks."""
    work(clock, data)
    watch.set_phase(RankPhase.FORWARD)
    work(clock, 1)
    watch.begin_waiting()
    work(clock, waiting - 10)
    watch.end_waiting()
    work(clock, 2)
    watch.begin_waiting()
    work(clock, 10)
    watch.set_phase(RankPhase.DATA)
    watch.set_phase(RankPhase.OPTIMIZER)
    work(clock, 4)
    watch.finish_step(number)
    work(clock, 5)


def made(clock: Host) -> StepTimer:
    rank_status: Any = Marks()
    watch = StepTimer(rank_status, clock=Clock(clock.now, lambda end, begin: (end - begin) / 2), every=2)
    watch.knows_waiting = True
    return watch


def settled(watch: StepTimer, clock: Host) -> StepTimer:
    """Return a timer after its first log."""
    watch.start()
    watch.set_phase(RankPhase.DATA)
    step(watch, clock, 1, data=1000)
    log(watch, clock)
    return watch


def log(watch: StepTimer, clock: Host) -> RankTimes:
    watch.leave_step(RankPhase.LOGGING)
    spent = watch.read()
    work(clock, 7000)
    watch.set_phase(RankPhase.DATA)
    return spent


STEP = RankTimes(steps=1, total=0.5 * 35, data=0.5 * 3, compute=0.5 * 7, callbacks=0.5 * 5, waiting=0.5 * 20)


def test_steps_are_added_up_by_kind() -> None:
    clock = Host()
    watch = settled(made(clock), clock)
    for number in (2, 3):
        step(watch, clock, number)
        watch.set_phase(RankPhase.DATA)
    step(watch, clock, 4, data=6)
    assert log(watch, clock) == RankTimes(3, 3 * STEP.total + 1.5, 6.0, 3 * STEP.compute, 3 * STEP.callbacks, 30.0)
    step(watch, clock, 5)
    # It isn't known what is computing.
    watch.knows_waiting = False
    assert log(watch, clock) == STEP._replace(compute=0.0)


def test_unknown_steps_are_left_out() -> None:
    clock = Host()
    watch = made(clock)
    # The checkpoint is made and restored meanwhile.
    watch.begin_waiting()
    watch.start()
    watch.set_phase(RankPhase.DATA)
    step(watch, clock, 1)
    assert log(watch, clock) == RankTimes()
    step(watch, clock, 2)
    watch.waiting_unknown()
    assert log(watch, clock) == RankTimes()
    step(watch, clock, 3)
    assert log(watch, clock) == STEP


@pytest.mark.parametrize(("phase", "is_logged"), [(RankPhase.EVALUATE, True), (RankPhase.CHECKPOINT, False)])
def test_evaluations_and_checkpoints_are_left_out(phase: RankPhase, is_logged: bool) -> None:
    clock = Host()
    watch = settled(made(clock), clock)
    step(watch, clock, 2)
    if is_logged:
        watch.leave_step(RankPhase.LOGGING)
        assert watch.read() == STEP
    watch.leave_step(phase)
    work(clock, 500)
    # One may follow the other.
    watch.leave_step(RankPhase.CHECKPOINT)
    work(clock, 500)
    watch.set_phase(RankPhase.DATA)
    step(watch, clock, 3, data=100)
    watch.set_phase(RankPhase.DATA)
    step(watch, clock, 4)
    number = 1 if is_logged else 2
    assert log(watch, clock) == RankTimes(*(number * each for each in STEP))
