"""Where this rank's time goes in a step: marked on the step path, added up when somebody wants to read it.

A mark says what is being done from here on: to who watches (`Pulse`), and with a stamp of the clock in a list. What a
stamp is depends on the device. A CPU's is the time, and every step counts. A GPU works off what Python has queued
long before: its stamps are events in its stream, of two steps between two logs, which are read when one logs.

Left out are: the steps before the first log, for what is loaded and laid out in them; the step after an evaluation or a
checkpoint; and these themselves.
"""

from __future__ import annotations

import operator
from time import perf_counter_ns
from typing import Any, Protocol, final

import torch

from framework.pulse import Phase, Pulse
from framework.slow_ranks import Spent

_WAITING, _APART = len(Phase), len(Phase) + 1  # beside the phases
_COMPUTE = (Phase.FORWARD, Phase.OPTIMIZER)  # the first with backward
_COUNTED = (Phase.DATA, *_COMPUTE, Phase.LOGGING, _WAITING)
_DISTURBING = (Phase.EVALUATE, Phase.CHECKPOINT)
_NOTHING = (0.0,) * (_APART + 1)
_MAX_MARKS = 4096  # before they are added up without being asked


class Clock(Protocol):
    """samples: its stamps cost too much to take them in every step. unit_s: what `between` counts in."""

    samples: bool
    unit_s: float

    def now(self) -> Any:
        """A stamp."""
        ...

    def between(self, end: Any, begin: Any) -> float:
        """The time between two stamps; waits until the end has come."""
        ...


@final
class HostClock:
    """The time, in nanoseconds."""

    samples, unit_s = False, 1e-9
    now, between = staticmethod(perf_counter_ns), staticmethod(operator.sub)


@final
class DeviceClock:
    """Events in the stream that computes: the time between two is from when the device came by the first.

    https://docs.pytorch.org/docs/stable/generated/torch.Event.html
    """

    samples, unit_s = True, 1e-3

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> torch.Event:
        event = torch.Event(device=self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def between(self, end: torch.Event, begin: torch.Event) -> float:
        end.synchronize()
        return begin.elapsed_time(end)


def clock_of(device: torch.device) -> Clock:
    return HostClock() if device.type == "cpu" else DeviceClock(device)


@final
class Stopwatch:
    """Marks what a rank does, and adds up how long. To be marked by the thread that trains.

    every: steps from one log to the next. It is also what strategies tell of waiting, see `framework.types.Waiting`;
    knows_waiting: whether this one's does. Where it doesn't, nothing in forward, backward and optimizer is known to be
    the rank's own.
    """

    def __init__(self, pulse: Pulse, *, clock: Clock, every: int) -> None:
        self.knows_waiting = False
        self._pulse = pulse
        self._tell = pulse.at
        self._clock = clock
        self._now = clock.now
        self._every = every
        self._takes_stamps = not clock.samples
        self._kinds: list[int] = []  # what was done from each of the stamps on
        self._stamps: list[Any] = []
        self._has_settled = False
        self._is_known = True
        self._steps = 0
        self._sums = list(_NOTHING)
        self._before: list[float] | None = None  # sums without the step that is left out

    def at(self, phase: Phase) -> None:
        """Say what is being done from here on."""
        if self._takes_stamps:
            self._kinds.append(phase)
            self._stamps.append(self._now())
        self._tell(phase)

    def apart(self, phase: Phase) -> None:
        """The same of what is no part of a step, whatever its phase."""
        if self._takes_stamps:
            self._kinds.append(_APART)
            self._stamps.append(self._now())
        if phase in _DISTURBING:
            self._add_up()
            self._before = list(self._sums)
        self._tell(phase)

    def stepped(self, step: int) -> None:
        """Say that optimizer step `step` is done, and callbacks hear of it."""
        self._pulse.stepped(step)
        self.at(Phase.LOGGING)
        if self._clock.samples:
            # In the middle: after a log the device isn't yet behind. A step ends with the first mark of the next.
            self._takes_stamps = self._every < 4 or (step + 1) % self._every - self._every // 2 in (0, 1)
        elif len(self._stamps) >= _MAX_MARKS:
            self._add_up()

    def begin_waiting(self) -> None:
        """From here on the rank waits for others, until the next mark or `end_waiting`."""
        if self._takes_stamps:
            self._kinds.append(_WAITING)
            self._stamps.append(self._now())

    def end_waiting(self) -> None:
        """Go on with what was done before `begin_waiting`."""
        if self._takes_stamps and len(self._kinds) > 1:
            self._kinds.append(self._kinds[-2])
            self._stamps.append(self._now())

    def lose_count(self) -> None:
        """Nobody knows how long this rank has waited: leave out the steps since the last reading."""
        self._is_known = False

    def start(self) -> None:
        """Training starts: the first reading gives nothing, and what was marked before is forgotten."""
        self._kinds.clear()
        self._stamps.clear()
        self._has_settled, self._is_known, self._before = False, True, None

    def read(self) -> Spent:
        """Of the steps since the last reading, to be called apart from them. Waits for the device where that is one."""
        self._add_up()
        seconds = [value * self._clock.unit_s for value in self._sums]
        spent = Spent(
            steps=self._steps,
            step=sum(seconds[kind] for kind in _COUNTED),
            data=seconds[Phase.DATA],
            compute=sum(seconds[kind] for kind in _COMPUTE) if self.knows_waiting else 0.0,
            callbacks=seconds[Phase.LOGGING],
            waiting=seconds[_WAITING],
        )
        is_good = self._has_settled and self._is_known
        self._has_settled = self._is_known = True
        self._steps, self._sums = 0, list(_NOTHING)
        self._before = None if self._before is None else list(_NOTHING)
        return spent if is_good else Spent()

    def _add_up(self) -> None:
        kinds, stamps, end_of_step = self._kinds, self._stamps, Phase.LOGGING
        if self._clock.samples:  # the last step may be there in part
            while len(kinds) > 1 and kinds[-2] is not end_of_step:
                del kinds[-1], stamps[-1]
        spans = list(map(self._clock.between, stamps[1:], stamps))  # of all marks but the last
        done = kinds[: len(spans)]
        if self._before is not None and end_of_step in done:
            begin = done.index(end_of_step) + 1
            self._sums, self._before = self._before, None
            done, spans = done[begin:], spans[begin:]
        sums = self._sums
        for kind, span in zip(done, spans, strict=True):
            sums[kind] += span
        if self._before is None:
            self._steps += done.count(end_of_step)
        last = len(stamps) if self._clock.samples else -1
        del kinds[:last], stamps[:last]
