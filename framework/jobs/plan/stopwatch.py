"""The callback of `plan.measure=true`: it times training steps, and ends the training once it has enough of them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, final

from framework.distributed.collectives import broadcast_object, gather_to_first
from framework.distributed.context import Context
from framework.jobs.plan.short_training import STEPS_FILE
from framework.system.run_dir import RunDir, write_object
from framework.training.trainer import Trainer
from framework.types import Callback, FitInfo, StepInfo

# The first steps load kernels, compile, and let DDP arrange its buckets. Not more of them than fit into _WARM_UP_S.
_WARM_UP_STEPS = 3
_WARM_UP_S = 5.0
_MOST_STEPS = 1000
_GROUPS = 5


@final
class Stopwatch(Callback):
    """Writes STEPS_FILE: the seconds of each part of a step, and those of a validation.

    Args:
        seconds: about how long to measure.
    """

    def __init__(self, *, context: Context, run_dir: RunDir, seconds: float) -> None:
        self._context = context
        self._file = run_dir.path / STEPS_FILE
        self._budget_s = seconds
        # The part that is under way, as `FitInfo.observe_phases` names it, and since when.
        self._part = "outside"
        self._since = 0.0
        # Of the step that is under way, by part.
        self._seconds: dict[str, float] = defaultdict(float)
        self._steps: list[Mapping[str, float]] = []
        # How many of these are the first ones, which are slower; None: they aren't over.
        self._warm_up: int | None = None
        self._last_step: int | None = None
        self._is_validating = False
        self._validation_s: float | None = None

    def observe_trainer(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def on_fit_start(self, info: FitInfo) -> None:
        self._observe_phases = info.observe_phases
        self._most_steps = _MOST_STEPS
        if info.total_steps is not None:
            self._most_steps = min(_MOST_STEPS, info.total_steps)
        self._since = time.perf_counter()
        self._began = self._since
        self._observe_phases(self._begin)

    def on_validation_start(self, _: Any) -> None:
        self._is_validating = True

    def on_validation_end(self, _: Any) -> None:
        self._begin("outside")
        self._is_validating = False

    def on_train_step_end(self, info: StepInfo) -> None:
        if self._warm_up is None or info.step == self._last_step:
            # A GPU runs behind Python.
            self._context.wait_for_devices()
        self._begin("logging")
        self._steps.append(self._seconds)
        self._seconds = defaultdict(float)
        if self._warm_up is None:
            self._end_warm_up_if_due(info.step)
        elif info.step == self._last_step:
            self._time_validation()

    def on_fit_end(self) -> None:
        self._observe_phases(None)
        steps = self._steps[self._warm_up :]
        if self._warm_up is None or not steps:
            # The run is no longer than the warm-up.
            steps = self._steps[-1:]
        of_ranks = gather_to_first(_usual(steps), self._context)
        if self._context.is_main:
            content = {"steps": len(steps), "parts": _mean(of_ranks), "validation_s": self._validation_s}
            write_object(self._file, content)

    def _begin(self, part: str) -> None:
        """Note that a part of a step begins."""
        now = time.perf_counter()
        if not self._is_validating:
            self._seconds[self._part] += now - self._since
        self._part = part
        self._since = now

    def _end_warm_up_if_due(self, step: int) -> None:
        """Decide how many steps follow. All ranks take the decision of the first."""
        done = len(self._steps)
        last_step = None
        if done >= _WARM_UP_STEPS or time.perf_counter() - self._began > _WARM_UP_S:
            fastest_s = min(sum(seconds.values()) for seconds in self._steps)
            number = max(1, int(self._budget_s / fastest_s))
            last_step = min(step + number, self._most_steps)
        last_step = broadcast_object(last_step, self._context)
        if last_step is not None:
            self._warm_up = done
            self._last_step = last_step
            self._trainer.settings = replace(self._trainer.settings, max_steps=last_step)
            self._seconds.clear()
            self._since = time.perf_counter()

    def _time_validation(self) -> None:
        if self._trainer.val_loaders:
            began = time.perf_counter()
            self._trainer.evaluate()
            self._context.wait_for_devices()
            self._validation_s = time.perf_counter() - began


def _usual(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean seconds of each part, over the middle one of five groups of steps, ordered by their time.

    So it doesn't matter if other programs disturb some of the steps.
    """
    size = max(1, len(steps) // _GROUPS)
    groups = [_mean(steps[begin : begin + size]) for begin in range(0, len(steps) - size + 1, size)]
    groups.sort(key=lambda seconds: sum(seconds.values()))
    return groups[len(groups) // 2]


def _mean(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean seconds of each part."""
    parts: dict[str, float] = defaultdict(float)
    for seconds in steps:
        for part, part_s in seconds.items():
            parts[part] += part_s / len(steps)
    return dict(parts)
