"""What a contestant notes while it runs: its figures, one JSON file a process, in the folder that a variable names.

The classes are callbacks of ours, named by `_target_`; the loops of others use the same `Stopwatch`. No torch here:
whoever is measured loads what it needs itself.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from framework.types import EvalInfo, FitInfo, StepInfo, Stop

FOLDER = "BENCHMARK_REPORTS"
GO_ON = "go_on"
"""A file in that folder: whoever holds still may go on."""

_HOLD_TIMEOUT_S = 300.0


def report(**figures: Any) -> None:
    """Leave this process's figures; the last call counts."""
    folder = Path(os.environ[FOLDER])
    unfinished = folder / f".{os.getpid()}"
    unfinished.write_text(json.dumps(figures))
    unfinished.rename(folder / f"{os.getpid()}.json")


def hold() -> None:
    """Tell that this process has come so far, and wait until it has been looked at."""
    report(pid=os.getpid())
    deadline = time.monotonic() + _HOLD_TIMEOUT_S
    while not (Path(os.environ[FOLDER]) / GO_ON).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody looked at this process for {_HOLD_TIMEOUT_S} s")
        time.sleep(0.02)


@final
class Stopwatch:
    """Reports what a step takes after `warm_up` others: call `tick` at the end of each, until `is_done`.

    It reports wall_s and cpu_s (of all threads), means over the steps, and begun and ended, by `time.time`.

    Args:
        warm_up: Steps that aren't timed.
        steps: Steps that are timed.
        seconds: Time more steps, if these take less than this.
        synchronize: Waits until the device has done all that it was asked to.
    """

    def __init__(
        self, warm_up: int, steps: int, *, seconds: float = 0.0, synchronize: Callable[[], object] | None = None
    ) -> None:
        if warm_up < 1 or steps < 1:
            raise ValueError(f"warm_up={warm_up} and steps={steps}: both must be at least 1.")
        self.synchronize = synchronize
        self.is_done = False
        self.last = warm_up + steps
        self._first = warm_up
        self._seconds = seconds
        self._count = 0
        # When the first timed step began, by three clocks.
        self._begun = 0.0
        self._began_wall_s = 0.0
        self._began_cpu_s = 0.0

    def tick(self) -> None:
        self._count += 1
        if self._count == self._first:
            self._wait()
            self._begun = time.time()
            self._began_wall_s = time.perf_counter()
            self._began_cpu_s = time.process_time()
        elif self._count >= self.last and not self.is_done and self._has_lasted():
            self.is_done = True
            self._report()

    def _has_lasted(self) -> bool:
        return time.perf_counter() - self._began_wall_s >= self._seconds

    def _report(self) -> None:
        self._wait()
        wall_s = time.perf_counter() - self._began_wall_s
        cpu_s = time.process_time() - self._began_cpu_s
        steps = self._count - self._first
        report(wall_s=wall_s / steps, cpu_s=cpu_s / steps, steps=steps, begun=self._begun, ended=time.time())

    def _wait(self) -> None:
        if self.synchronize is not None:
            self.synchronize()


@final
class Clock:
    """Times the steps of a run of ours. With `seconds` it ends the run, else the run has so many steps."""

    def __init__(self, warm_up: int, steps: int, seconds: float = 0.0) -> None:
        self._stopwatch = Stopwatch(warm_up, steps, seconds=seconds)
        self._tick = self._stopwatch.tick
        self._ends_run = seconds > 0

    def on_train_step_end(self, info: StepInfo) -> Stop | None:
        if info.step == 1 and info.loss.is_cuda:
            from torch import cuda

            self._stopwatch.synchronize = cuda.synchronize
        self._tick()
        if not self._ends_run or not self._stopwatch.is_done:
            return None
        from framework.types import Stop

        return Stop("The steps were timed.")


@final
class FirstStep:
    """Reports when the first step of a run of ours was done."""

    def on_train_step_end(self, info: StepInfo) -> None:
        if info.step == 1:
            report(first_step=time.time())


@final
class Hold:
    """Holds a run of ours still after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_step_end(self, info: StepInfo) -> None:
        if info.step == self._step:
            hold()


class Intervals:
    """Times a whole training, and what a log and a validation take in it. Call `tick` in each step, at one place.

    `finish` reports, in seconds: `training`, all of it; `step`, the median of steps with nothing else; `log` and
    `validation`, what these take beyond a step. In a step that is logged, the norm of gradients is part of the log.
    """

    def __init__(self, steps_per_epoch: int, log_every: int = 50) -> None:
        self._steps_per_epoch = steps_per_epoch
        self._log_every = log_every
        self._ticks_s: list[float] = []
        self._began_s = time.perf_counter()

    def start(self) -> None:
        self._began_s = time.perf_counter()

    def tick(self) -> None:
        self._ticks_s.append(time.perf_counter())

    def finish(self) -> None:
        training_s = time.perf_counter() - self._began_s
        logged: list[float] = []
        before_log: list[float] = []
        validated: list[float] = []
        plain: list[float] = []
        # The interval after step n holds what follows that step, and step n + 1. The first steps are slow.
        for step in range(2, len(self._ticks_s)):
            interval_s = self._ticks_s[step] - self._ticks_s[step - 1]
            is_log = step % self._log_every == 0
            if step % self._steps_per_epoch == 0:
                if not is_log:
                    validated.append(interval_s)
            elif is_log:
                logged.append(interval_s)
            elif (step + 1) % self._log_every == 0:
                before_log.append(interval_s)
            else:
                plain.append(interval_s)
        step_s = statistics.median(plain)
        report(
            training=training_s,
            step=step_s,
            log=statistics.median(logged) + statistics.median(before_log) - 2 * step_s,
            validation=statistics.median(validated) - step_s,
        )


@final
class WholeRun:
    """Times a run of ours by its `Intervals`."""

    def __init__(self, steps_per_epoch: int) -> None:
        self._intervals = Intervals(steps_per_epoch)

    def on_fit_start(self, info: FitInfo) -> None:
        self._intervals.start()

    def on_train_step_end(self, info: StepInfo) -> None:
        self._intervals.tick()

    def on_fit_end(self) -> None:
        self._intervals.finish()


class TrainingTime:
    """Counts the seconds of training, without validation's."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since_s = 0.0

    def start(self) -> None:
        self._since_s = time.perf_counter()

    def add(self) -> None:
        """Count the time since the last call, or since the start."""
        now_s = time.perf_counter()
        self.seconds += now_s - self._since_s
        self._since_s = now_s


@final
class Curve:
    """Reports a run's validation accuracies, each with the seconds of training until then, without validation's."""

    def __init__(self) -> None:
        self._curve: list[tuple[float, float]] = []
        self._time = TrainingTime()

    def on_fit_start(self, info: FitInfo) -> None:
        self._time.start()

    def on_train_step_end(self, info: StepInfo) -> None:
        self._time.add()

    def on_validation_end(self, info: EvalInfo) -> None:
        self._curve.append((self._time.seconds, info.metrics["val/accuracy"]))
        self._time.start()

    def on_fit_end(self) -> None:
        report(curve=self._curve, seconds=self._time.seconds)


@final
class Milestones:
    """Reports when validation first reached two accuracies, and stops at the second.

    It reports `command`, the times by `time.time`, and `training`, the seconds of training until then, without
    validation's.
    """

    def __init__(self, low: float, high: float) -> None:
        self._accuracies = (low, high)
        self._reached_at: dict[str, float] = {}
        self._reached_after: dict[str, float] = {}
        self._time = TrainingTime()

    def on_fit_start(self, info: FitInfo) -> None:
        self._time.start()

    def on_train_step_end(self, info: StepInfo) -> None:
        self._time.add()

    def on_validation_end(self, info: EvalInfo) -> Stop | None:
        from framework.types import Stop

        for accuracy in self._accuracies:
            name = f"{accuracy:.0%}"
            if info.metrics["val/accuracy"] >= accuracy and name not in self._reached_at:
                self._reached_at[name] = time.time()
                self._reached_after[name] = self._time.seconds
        self._time.start()
        if len(self._reached_at) < len(self._accuracies):
            return None
        return Stop("Both accuracies were reached.")

    def on_fit_end(self) -> None:
        report(command=self._reached_at, training=self._reached_after)
