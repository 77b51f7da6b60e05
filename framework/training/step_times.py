"""Where a rank's time goes in a step.

The trainer marks the beginning of each phase, for the monitor (`RankStatus`) and with a time stamp. On the CPU every
mark takes the time. On a GPU, which runs behind Python, a mark records an event in its stream, in two steps between two
logs only, and the events are read at the log.

Not counted: steps before the first log, which load and allocate; the step after an evaluation or a checkpoint.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

import torch

from framework.monitoring.rank_status import RankPhase, RankStatus
from framework.monitoring.slow_ranks import RankTimes

# What a rank does beside the phases of a step: it waits for other ranks in one, or is outside of any.
_WAITING = max(RankPhase) + 1
_OUTSIDE = max(RankPhase) + 2
# The last phase of a step.
_CALLBACKS = RankPhase.LOGGING
_COMPUTE = (RankPhase.FORWARD, RankPhase.BACKWARD, RankPhase.OPTIMIZER)
_COUNTED = (RankPhase.DATA, *_COMPUTE, _CALLBACKS, _WAITING)
SHARES = {
    "forward": RankPhase.FORWARD,
    "backward": RankPhase.BACKWARD,
    "optimizer": RankPhase.OPTIMIZER,
    "callbacks": _CALLBACKS,
}
"""The parts of a step that are logged as the ranks' mean share, beside data and waiting; 0 if unknown."""
_NAMES = {phase: phase.label for phase in RankPhase} | {_WAITING: "waiting", _OUTSIDE: "outside"}
# Marks that are kept before they are added up.
_MAX_MARKS = 4096


@dataclass(frozen=True)
class Clock:
    """How to take time stamps."""

    # Returns a stamp.
    now: Callable[[], Any]
    # (end, begin) → the seconds between two stamps; waits until `end` has been reached.
    between: Callable[[Any, Any], float]
    # Stamps are too expensive to take them in every step.
    is_sampled: bool = False


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
        # If False, compute time may include waiting for other ranks.
        self.knows_waiting = False
        # Of the steps that were read last, see SHARES.
        self.shares = [0.0] * len(SHARES)
        self._rank_status = rank_status
        self._clock = clock
        self._every = every
        self._takes_stamps = not clock.is_sampled
        # What began at each stamp, and the stamps.
        self._kinds: list[int] = []
        self._stamps: list[Any] = []
        # All steps since the last reading were measured.
        self._is_complete = False
        # The next step is left out: it follows an evaluation or a checkpoint.
        self._skips_step = False
        self._observer: Callable[[str], None] | None = None
        # Since the last reading: steps, and the seconds of each kind.
        self._steps = 0
        self._seconds = _no_seconds()

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
        self.set_phase(_CALLBACKS)
        if self._clock.is_sampled:
            # Halfway between two logs, when the GPU's queue is full again. A step ends with the first mark of the next.
            steps_past_middle = (step + 1) % self._every - self._every // 2
            self._takes_stamps = self._every < 4 or steps_past_middle in (0, 1)
        elif len(self._stamps) >= _MAX_MARKS:
            self._add_up()

    def observe(self, observer: Callable[[str], None] | None) -> None:
        """Call `observer` with the name of whatever begins at each mark, as `FitInfo` says; None ends that."""
        self._observer = observer

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
        self._is_complete = False
        self._skips_step = False

    def read(self) -> RankTimes:
        """Return the times of the steps since the last reading; waits for a GPU. Call it outside of a step.

        They are all 0 if not all of these steps were measured.
        """
        self._add_up()
        seconds = self._seconds
        steps = self._steps
        is_complete = self._is_complete
        self._seconds = _no_seconds()
        self._steps = 0
        self._is_complete = True

        step_s = sum(seconds[kind] for kind in _COUNTED)
        if not is_complete or step_s == 0:
            self.shares = [0.0] * len(SHARES)
        else:
            self.shares = [seconds[phase] / step_s for phase in SHARES.values()]
        if not is_complete:
            return RankTimes()
        compute_s = 0.0
        if self.knows_waiting:
            compute_s = sum(seconds[kind] for kind in _COMPUTE)
        return RankTimes(
            steps=steps,
            total=step_s,
            data=seconds[RankPhase.DATA],
            compute=compute_s,
            callbacks=seconds[_CALLBACKS],
            waiting=seconds[_WAITING],
        )

    def _stamp(self, kind: int) -> None:
        if self._takes_stamps:
            self._kinds.append(kind)
            self._stamps.append(self._clock.now())
        if self._observer is not None:
            self._observer(_NAMES[kind])

    def _add_up(self) -> None:
        """Add the time between the marks to the sums, and drop these marks.

        The last mark is kept, since its time has not ended. If only some steps are marked, an incomplete last one is
        dropped.
        """
        kinds = self._kinds
        stamps = self._stamps
        if self._clock.is_sampled:
            # A step ends with the mark after its callbacks.
            while len(kinds) > 1 and kinds[-2] != _CALLBACKS:
                kinds.pop()
                stamps.pop()
        # With `map`, since a log has 300 of them at 50 steps.
        spans = list(map(self._clock.between, stamps[1:], stamps))
        ended = kinds[: len(spans)]

        begin = 0
        if self._skips_step:
            self._skips_step = _CALLBACKS not in ended
            begin = len(ended) if self._skips_step else ended.index(_CALLBACKS) + 1
        seconds = self._seconds
        for kind, span in zip(ended[begin:], spans[begin:], strict=True):
            seconds[kind] += span
        self._steps += ended[begin:].count(_CALLBACKS)

        if self._clock.is_sampled:
            kinds.clear()
            stamps.clear()
        else:
            del kinds[:-1]
            del stamps[:-1]


def _no_seconds() -> list[float]:
    """Return 0 for every phase, waiting, and outside of steps."""
    return [0.0] * (_OUTSIDE + 1)


@final
@dataclass
class Throughput:
    """Steps, samples of all ranks, and the time they took, without the time spent evaluating and saving."""

    samples: int = 0
    # The optimizer steps done when it was read last.
    step: int = 0
    # Of `time.perf_counter`.
    since: float = field(default_factory=time.perf_counter)

    def read(self, *, step: int) -> tuple[float, float]:
        """Return the steps and the samples per second since the last reading, given the steps done by now."""
        now = time.perf_counter()
        seconds = max(now - self.since, 1e-9)
        steps_per_s = (step - self.step) / seconds
        samples_per_s = self.samples / seconds
        self.samples = 0
        self.step = step
        self.since = now
        return steps_per_s, samples_per_s

    def leave_out(self, *, since: float) -> None:
        """Don't count the time from `since` (of `time.perf_counter`) until now."""
        self.since += time.perf_counter() - since
