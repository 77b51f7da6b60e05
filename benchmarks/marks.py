"""What a contestant notes while it runs: its figures, one JSON file a process, in the folder that a variable names.

The classes are callbacks of ours, named by `_target_`; the loops of others use the same `Stopwatch`. No torch here:
whoever is measured loads what it needs itself.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from framework.types import EvalInfo, FitInfo, StepInfo, Stop

FOLDER = "BENCHMARK_REPORTS"
GO_ON = "go_on"  # a file in that folder: whoever holds still may go on
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

    wall_s and cpu_s (of all threads) are means over the steps; begun and ended are times of the clock on the wall.
    steps: how many are timed. seconds: more are, if these take less. synchronize: waits until a device has done what it
    was asked to.
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
        self._begun = self._wall = self._cpu = 0.0

    def tick(self) -> None:
        self._count += 1
        if self._count == self._first:
            self._wait()
            self._begun, self._wall, self._cpu = time.time(), time.perf_counter(), time.process_time()
        elif self._count >= self.last and not self.is_done and time.perf_counter() - self._wall >= self._seconds:
            self.is_done = True
            self._wait()
            wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
            steps = self._count - self._first
            report(wall_s=wall / steps, cpu_s=cpu / steps, steps=steps, begun=self._begun, ended=time.time())

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

    def on_train_step_end(self, report: StepInfo) -> Stop | None:
        if report.step == 1 and report.loss.is_cuda:
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

    def on_train_step_end(self, now: StepInfo) -> None:
        if now.step == 1:
            report(first_step=time.time())


@final
class Hold:
    """Holds a run of ours still after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_step_end(self, now: StepInfo) -> None:
        if now.step == self._step:
            hold()


@final
class Curve:
    """Reports a run's validation accuracies, each with the seconds of training until then, without validation's."""

    def __init__(self) -> None:
        self._curve: list[tuple[float, float]] = []
        self._seconds = self._since = 0.0

    def on_fit_start(self, _: FitInfo) -> None:
        self._since = time.perf_counter()

    def on_train_step_end(self, _: StepInfo) -> None:
        now = time.perf_counter()
        self._seconds, self._since = self._seconds + now - self._since, now

    def on_validation_end(self, now: EvalInfo) -> None:
        self._curve.append((self._seconds, now.metrics["val/accuracy"]))
        self._since = time.perf_counter()

    def on_fit_end(self) -> None:
        report(curve=self._curve, seconds=self._seconds)


@final
class Milestones:
    """Reports when validation first reached two accuracies, and stops at the second.

    command: on the wall clock; training: seconds of training until then, without validation's.
    """

    def __init__(self, low: float, high: float) -> None:
        self._accuracies = (low, high)
        self._found: dict[str, dict[str, float]] = {"command": {}, "training": {}}
        self._seconds = self._since = 0.0

    def on_fit_start(self, _: FitInfo) -> None:
        self._since = time.perf_counter()

    def on_train_step_end(self, _: StepInfo) -> None:
        now = time.perf_counter()
        self._seconds, self._since = self._seconds + now - self._since, now

    def on_validation_end(self, now: EvalInfo) -> Stop | None:
        from framework.types import Stop

        for accuracy in self._accuracies:
            if now.metrics["val/accuracy"] >= accuracy:
                self._found["command"].setdefault(f"{accuracy:.0%}", time.time())
                self._found["training"].setdefault(f"{accuracy:.0%}", self._seconds)
        self._since = time.perf_counter()
        return Stop("Both accuracies were reached.") if len(self._found["command"]) == 2 else None

    def on_fit_end(self) -> None:
        report(**self._found)
