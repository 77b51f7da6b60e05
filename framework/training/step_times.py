"""Where a rank's time goes in a step.

The trainer marks the beginning of each phase, for the monitor (`RankStatus`) and with a time stamp. On the CPU every
mark takes the time. On a GPU, which runs behind Python, a mark records an event in its stream, in two steps between two
logs only, and the events are read at the log.

Not counted: steps before the first log, which load and allocate; the step after an evaluation or a checkpoint.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

import torch

from framework.monitoring.rank_status import RankPhase, RankStatus
from framework.monitoring.slow_ranks import Spent

# Kinds of time beside the phases.
_WAITING = len(RankPhase)
_OUTSIDE = len(RankPhase) + 1
_COMPUTE = (RankPhase.FORWARD, RankPhase.BACKWARD, RankPhase.OPTIMIZER)
_COUNTED = (RankPhase.DATA, *_COMPUTE, RankPhase.LOGGING, _WAITING)
SHARES = {
    "forward": RankPhase.FORWARD,
    "backward": RankPhase.BACKWARD,
    "optimizer": RankPhase.OPTIMIZER,
    "callbacks": RankPhase.LOGGING,
}
"""The parts of a step that are logged as the ranks' mean share, beside data and waiting; 0 if unknown."""
_NOTHING = (0.0,) * (_OUTSIDE + 1)
_MAX_MARKS = 4096  # before they are added up


@dataclass(frozen=True)
class Clock:
    """How to take time stamps."""

    now: Callable[[], Any]  # returns a stamp
    between: Callable[[Any, Any], float]  # (end, begin) → seconds between them; waits until `end` has been reached
    is_sampled: bool = False  # stamps are too expensive to take them in every step


def clock_of(device: torch.device) -> Clock:
    """Return the host's clock for a CPU, otherwise one of events in the device's current stream.

    https://docs.pytorch.org/docs/stable/generated/torch.Event.html
    """
    if device.type == "cpu":
        return Clock(time.perf_counter, operator.sub)

    def now() -> torch.Event:
        event = torch.Event(device=device, enable_timing=True)
        event.record(torch.accelerator.current_stream(device))
        return event

    def between(end: torch.Event, begin: torch.Event) -> float:
        end.synchronize()
        return begin.elapsed_time(end) / 1000

    return Clock(now, between, is_sampled=True)


@final
class StepTimer:
    """Mark what a rank does, and add up how long it takes. Strategies get it as `framework.types.Waiting`.

    Args:
        every: steps between two logs.
    """

    def __init__(self, rank_status: RankStatus, *, clock: Clock, every: int) -> None:
        self.knows_waiting = False  # if False, compute time may include waiting for other ranks
        self._rank_status = rank_status
        self._clock = clock
        self._every = every
        self._takes_stamps = not clock.is_sampled
        self._kinds: list[int] = []  # what began at each stamp
        self._stamps: list[Any] = []
        self._is_complete = False  # all steps since the last reading were measured
        self._steps = 0
        self._sums = list(_NOTHING)
        self._skips_step = False  # the one after an evaluation or a checkpoint
        self.shares = [0.0] * len(SHARES)  # of the steps that were read last, see SHARES

    def set_phase(self, phase: RankPhase) -> None:
        """Begin a phase of the step."""
        self._stamp(phase)
        self._rank_status.set_phase(phase)

    def leave_step(self, phase: RankPhase) -> None:
        """Begin something that isn't part of a step."""
        self._stamp(_OUTSIDE)
        if phase in (RankPhase.EVALUATE, RankPhase.CHECKPOINT):
            self._add_up()
            self._skips_step = True
        self._rank_status.set_phase(phase)

    def finish_step(self, step: int) -> None:
        """Mark optimizer step `step` as done; callbacks come next."""
        self._rank_status.finish_step(step)
        self.set_phase(RankPhase.LOGGING)
        if self._clock.is_sampled:
            # Halfway between two logs, when the GPU's queue is full again. A step ends with the first mark of the next.
            self._takes_stamps = self._every < 4 or (step + 1) % self._every - self._every // 2 in (0, 1)
        elif len(self._stamps) >= _MAX_MARKS:
            self._add_up()

    def begin_waiting(self) -> None:
        self._stamp(_WAITING)

    def end_waiting(self) -> None:
        """Return to the phase before `begin_waiting`."""
        if len(self._kinds) > 1:
            self._stamp(self._kinds[-2])

    def waiting_unknown(self) -> None:
        """Drop the steps since the last reading."""
        self._is_complete = False

    def start(self) -> None:
        """Begin training: forget earlier marks; the first reading will be empty."""
        self._kinds.clear()
        self._stamps.clear()
        self._is_complete = self._skips_step = False

    def read(self) -> Spent:
        """Return the times of the steps since the last reading; waits for a GPU. Call it outside of a step."""
        self._add_up()
        seconds = self._sums
        spent = Spent(
            steps=self._steps,
            step=sum(seconds[kind] for kind in _COUNTED),
            data=seconds[RankPhase.DATA],
            compute=sum(seconds[kind] for kind in _COMPUTE) if self.knows_waiting else 0.0,
            callbacks=seconds[RankPhase.LOGGING],
            waiting=seconds[_WAITING],
        )
        is_complete = self._is_complete
        total = spent.step if is_complete and spent.step else math.inf
        self.shares = [seconds[phase] / total for phase in SHARES.values()]
        self._is_complete = True
        self._steps = 0
        self._sums = list(_NOTHING)
        return spent if is_complete else Spent()

    def _stamp(self, kind: int) -> None:
        if self._takes_stamps:
            self._kinds.append(kind)
            self._stamps.append(self._clock.now())

    def _add_up(self) -> None:
        kinds = self._kinds
        stamps = self._stamps
        end_of_step = RankPhase.LOGGING
        if self._clock.is_sampled:  # the last step may be incomplete
            while len(kinds) > 1 and kinds[-2] is not end_of_step:
                del kinds[-1], stamps[-1]
        spans = list(map(self._clock.between, stamps[1:], stamps))  # of all marks but the last
        done = kinds[: len(spans)]
        if self._skips_step:
            self._skips_step = end_of_step not in done
            begin = len(done) if self._skips_step else done.index(end_of_step) + 1
            done = done[begin:]
            spans = spans[begin:]
        for kind, span in zip(done, spans, strict=True):
            self._sums[kind] += span
        self._steps += done.count(end_of_step)
        last = len(stamps) if self._clock.is_sampled else -1
        del kinds[:last], stamps[:last]


@final
@dataclass
class Throughput:
    """Samples of all ranks and the time they took, without the time spent evaluating and saving."""

    samples: int = 0
    since: float = field(default_factory=time.perf_counter)

    def read(self) -> float:
        """Return the samples per second since the last reading."""
        now = time.perf_counter()
        rate = self.samples / max(now - self.since, 1e-9)
        self.samples = 0
        self.since = now
        return rate

    def leave_out(self, *, since: float) -> None:
        """Don't count the time from `since` (of `time.perf_counter`) until now."""
        self.since += time.perf_counter() - since
