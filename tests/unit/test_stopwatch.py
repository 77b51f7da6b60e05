"""What a rank's steps are made of, by clocks that the tests move."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from framework.pulse import Phase
from framework.slow_ranks import Spent
from framework.stopwatch import Clock, DeviceClock, HostClock, Stopwatch, clock_of
from tests.unit.small_trainer import Marks


class Host:
    """Moves when somebody works."""

    samples, unit_s = False, 0.5

    def __init__(self) -> None:
        self.time = 0
        self.taken = 0

    def now(self) -> int:
        self.taken += 1
        return self.time

    def between(self, end: int, begin: int) -> float:
        return end - begin


class Event:
    """As torch's: it has a time once the device has come by."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.time: int | None = None

    def synchronize(self) -> None:
        self.device.work_off()

    def elapsed_time(self, end: Event) -> int:
        assert self.time is not None
        assert end.time is not None, "the device hasn't come by"
        return end.time - self.time


class Device:
    """A clock whose stamps are events in a queue, whose work is done when somebody waits for it."""

    samples, unit_s = True, 0.5
    between: Any = DeviceClock.between

    def __init__(self) -> None:
        self.queue: list[Event | int] = []
        self.time = 0
        self.taken = 0
        self.waits = 0

    def now(self) -> Event:
        self.taken += 1
        event = Event(self)
        self.queue.append(event)
        return event

    def work_off(self) -> None:
        self.waits += bool(self.queue)
        for each in self.queue:
            if isinstance(each, Event):
                each.time = self.time
            else:
                self.time += each
        self.queue.clear()


def work(clock: Any, time: int) -> None:
    if isinstance(clock, Device):
        clock.queue.append(time)
    else:
        clock.time += time


def step(watch: Stopwatch, clock: Any, number: int, *, data: int = 3, waiting: int = 20) -> None:
    """One of 1 + 2 for the forward and backward, 20 of waiting, 4 for the optimizer, 5 for callbacks."""
    work(clock, data)
    watch.at(Phase.FORWARD)
    work(clock, 1)
    watch.begin_waiting()
    work(clock, waiting - 10)
    watch.end_waiting()
    work(clock, 2)
    watch.begin_waiting()
    work(clock, 10)
    watch.at(Phase.DATA)
    watch.at(Phase.OPTIMIZER)
    work(clock, 4)
    watch.stepped(number)
    work(clock, 5)


def made(clock: Clock, *, every: int = 2) -> Stopwatch:
    pulse: Any = Marks()
    watch = Stopwatch(pulse, clock=clock, every=every)
    watch.knows_waiting = True
    return watch


def settled(watch: Stopwatch, clock: Any) -> Stopwatch:
    """With the first log behind it."""
    watch.start()
    watch.at(Phase.DATA)
    step(watch, clock, 1, data=1000)
    log(watch, clock)
    return watch


def log(watch: Stopwatch, clock: Any) -> Spent:
    watch.apart(Phase.LOGGING)
    spent = watch.read()
    work(clock, 7000)
    watch.at(Phase.DATA)
    return spent


STEP = Spent(steps=1, step=0.5 * 35, data=0.5 * 3, compute=0.5 * 7, callbacks=0.5 * 5, waiting=0.5 * 20)


def test_steps_since_the_last_log_are_added_up_by_kind() -> None:
    clock = Host()
    watch = settled(made(clock), clock)
    for number in (2, 3):
        step(watch, clock, number)
        watch.at(Phase.DATA)
    step(watch, clock, 4, data=6)
    assert log(watch, clock) == Spent(3, 3 * STEP.step + 1.5, 6.0, 3 * STEP.compute, 3 * STEP.callbacks, 30.0)
    step(watch, clock, 5)
    watch.knows_waiting = False  # nothing is known to be computing
    assert log(watch, clock) == STEP._replace(compute=0.0)


def test_steps_before_the_first_log_or_with_unknown_waiting_are_left_out() -> None:
    clock = Host()
    watch = made(clock)
    watch.begin_waiting()  # while it is made and restored
    watch.start()
    watch.at(Phase.DATA)
    step(watch, clock, 1)
    assert log(watch, clock) == Spent()
    step(watch, clock, 2)
    watch.lose_count()
    assert log(watch, clock) == Spent()
    step(watch, clock, 3)
    assert log(watch, clock) == STEP


@pytest.mark.parametrize("phase", [Phase.EVALUATE, Phase.CHECKPOINT])
@pytest.mark.parametrize("is_logged", [True, False])
def test_an_evaluation_or_a_checkpoint_and_the_step_after_it_are_left_out(phase: Phase, is_logged: bool) -> None:
    clock = Host()
    watch = settled(made(clock), clock)
    step(watch, clock, 2)
    if is_logged:
        watch.apart(Phase.LOGGING)
        assert watch.read() == STEP
    watch.apart(phase)
    work(clock, 500)
    watch.apart(Phase.CHECKPOINT)  # one may follow the other
    work(clock, 500)
    watch.at(Phase.DATA)
    step(watch, clock, 3, data=100)
    watch.at(Phase.DATA)
    step(watch, clock, 4)
    number = 1 if is_logged else 2
    assert log(watch, clock) == Spent(*(number * each for each in STEP))


def test_on_a_device_one_step_between_two_logs_is_timed_and_only_the_log_waits_for_it() -> None:
    clock = Device()
    watch = settled(made(clock, every=10), clock)
    taken = []
    for number in range(2, 11):
        before = clock.taken
        step(watch, clock, number, data=number)
        if number < 10:
            watch.at(Phase.DATA)
        taken.append(clock.taken - before)
    assert sum(map(bool, taken)) <= 3
    waits = clock.waits
    assert log(watch, clock) == STEP._replace(step=0.5 * 37, data=0.5 * 5)  # of step 5, in the middle
    assert clock.waits == waits + 1


@pytest.mark.parametrize("every", [1, 2, 3])
def test_on_a_device_every_step_is_timed_where_logs_come_fast(every: int) -> None:
    clock = Device()
    watch = settled(made(clock, every=every), clock)
    for number in range(2, 2 + every):
        step(watch, clock, number)
        if number < 1 + every:
            watch.at(Phase.DATA)
    assert log(watch, clock) == Spent(*(every * number for number in STEP))


def test_a_cpu_is_timed_by_the_hosts_clock_in_nanoseconds() -> None:
    assert isinstance(clock_of(torch.device("cpu")), HostClock)
    assert isinstance(clock_of(torch.device("cuda", 1)), DeviceClock)
    clock = HostClock()
    begin = clock.now()
    assert clock.between(clock.now(), begin) >= 0
    assert clock.between(5_000_000_000, 2_000_000_000) * clock.unit_s == pytest.approx(3.0)
