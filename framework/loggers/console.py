"""Progress on rank 0's standard output: a live view on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import math
import re
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any, final

from framework.checkpoint.layout import LAST, step_of
from framework.config.schema import ProgressMode
from framework.monitoring.slow_ranks import SLOW_SHARE
from framework.system.formatting import format_bytes, format_rate
from framework.system.run_dir import RunDir
from framework.types import FitInfo, StepInfo

if TYPE_CHECKING:
    from framework.loggers.live_view import LiveView, Row

_REDRAW_S = 0.25
_PLAIN_LINE_S = 5.0
_RATE_WINDOW = 120  # redraws the rate is taken over: half a minute on a terminal
_EVALUATED = ("val/", "test/")
_IN_PLAIN_LINES = re.compile(r"train/(.+/)?loss|train/lr")  # the losses of phases, too
_RATE = "_per_s"


@final
class ConsoleLogger:
    """Show progress, losses and metrics, rates, memory and the last checkpoint; print a line for each evaluation.

    Epochs are counted from 0, as everywhere: the last of 10 is `epoch 9/9`. Steps are optimizer steps done.

    There is no drawing thread: `step` keeps the report and looks at the clock (0.1 µs); it draws four times a second
    on a terminal (0.4 ms), every five seconds elsewhere. It never reads a tensor.
    """

    def __init__(self, progress: ProgressMode = "auto", *, run_dir: RunDir | None = None) -> None:
        """progress: as `trainer.progress`."""
        self._progress = progress
        self._last_checkpoint = None if run_dir is None else run_dir.checkpoints / LAST
        self._out: Any = sys.stdout  # a Tee in a rank that was forked: no TextIO for the type checker
        self._view: LiveView | None = None
        self._info: FitInfo
        self._report: StepInfo | None = None
        self._history: deque[tuple[float, int]] = deque(maxlen=_RATE_WINDOW)  # time and step of each line
        self._training: dict[str, float] = {}  # the last value of each name
        self._evaluated: dict[str, float] = {}  # of the last evaluation, after step `_evaluated_step`
        self._evaluated_step = 0

    def fit_start(self, info: FitInfo) -> None:
        self._info = info
        self._history.append((monotonic(), info.start_step))
        if self._progress == "rich" or (self._progress == "auto" and self._out.isatty()):
            from framework.loggers.live_view import start_view

            self._view = start_view(self._progress)
        self._plan_draw()

    def step(self, report: StepInfo) -> None:
        self._report = report
        if monotonic() >= self._next_draw_s:
            self._draw(report)

    def metrics(self, values: Mapping[str, float], *, step: int, epoch: int) -> None:
        evaluated = {name: value for name, value in values.items() if name.startswith(_EVALUATED)}
        self._training.update({name: value for name, value in values.items() if name not in evaluated})
        if evaluated:
            self._evaluated, self._evaluated_step = evaluated, step
            self._print(f"epoch {epoch}  step {step}  {' '.join(_numbers(evaluated))}")

    def text(self, tag: str, text: str, *, step: int) -> None:
        """Do nothing: texts are for TensorBoard."""

    def close(self) -> None:
        """Show the last state and restore the terminal; may be called again."""
        if self._report is not None and (self._view is not None or self._report.step != self._history[-1][1]):
            self._draw(self._report)
        if self._view is not None:
            self._view.stop()
            self._view = None

    def _plan_draw(self) -> None:
        interval_s = _PLAIN_LINE_S if self._view is None else _REDRAW_S
        self._next_draw_s = math.inf if self._progress == "off" else monotonic() + interval_s

    def _draw(self, report: StepInfo) -> None:
        self._history.append((monotonic(), report.step))
        if self._view is None:
            self._print(self._line(report))
        else:
            self._view.show(self._rows(report))
        self._plan_draw()

    def _print(self, line: str) -> None:
        if self._progress != "off":
            with suppress(OSError):  # a full disk or a broken pipe must not end training
                print(line, file=sys.stdout if self._view is not None else self._out, flush=True)

    def _line(self, report: StepInfo) -> str:
        total, rate, left = self._info.total_steps, self._rate(), self._left(report)
        parts = [f"epoch {self._epoch(report)}", f"step {report.step}" + (f"/{total}" if total else "")]
        if rate:
            parts.append(f"{rate:.4g} steps/s")
        if left:
            parts.append(f"ETA {left}")
        shown = {name: value for name, value in self._training.items() if _IN_PLAIN_LINES.fullmatch(name)}
        parts.append(" ".join(_numbers(shown)))
        return "  ".join(part for part in parts if part)

    def _rows(self, report: StepInfo) -> Iterator[Row]:
        """Yield what the live view shows; the most important items of a row come first."""
        from framework.loggers.live_view import Row

        info, left = self._info, self._left(report)
        if info.steps_per_epoch:
            # Earlier epochs may have had other numbers of steps.
            epoch_start = info.start_step + (info.steps_left_in_epoch or 0)
            done = (report.step - 1 - epoch_start) % info.steps_per_epoch + 1
            place = f"{done}/{info.steps_per_epoch}"
            yield Row(f"epoch {self._epoch(report)}", [place], done=done, of=info.steps_per_epoch)
        place = f"{report.step}/{info.total_steps}" if info.total_steps else f"step {report.step}"
        yield Row("total", [place, *([f"{left} left"] if left else [])], done=report.step, of=info.total_steps)
        train = {name: value for name, value in self._training.items() if name.startswith("train/")}
        train = {name: value for name, value in train.items() if not name.endswith((_RATE, "/mfu"))}
        yield Row("train", _numbers(train))
        if self._evaluated:
            yield Row("evaluated", [*_numbers(self._evaluated), f"at step {self._evaluated_step}"])
        yield Row("speed", list(self._speed()))
        memory = self._training.get("device/memory_gb")
        state = [] if memory is None else [f"memory {format_bytes(memory * 1e9)}"]
        yield Row("state", [*state, *self._saved()])

    def _speed(self) -> Iterator[str]:
        values, rate = self._training, self._rate()
        if rate:
            yield f"{rate:.4g} steps/s"
        rates = {name.removeprefix("train/"): value for name, value in values.items() if name.endswith(_RATE)}
        flops = rates.pop(f"tflop{_RATE}", None)
        if len(rates) > 1:  # the task's own, such as tokens, says more
            rates.pop(f"samples{_RATE}", None)
        for name, value in rates.items():
            yield f"{value:,.0f} {name.removesuffix(_RATE)}/s"
        if "train/mfu" in values:
            yield f"MFU {values['train/mfu']:.0%}"
        elif flops is not None:
            yield format_rate(flops * 1e12, "FLOP/s")
        for name, label in (("device/utilization", "GPU"), ("time/data", "data"), ("time/waiting", "waiting")):
            if name in values:
                yield f"{label} {values[name]:.0%}"
        if "skew/worst" in values:
            is_slow = values["skew/worst"] >= SLOW_SHARE
            yield f"skew {values['skew/worst']:.0%}" + (f" (rank {values['skew/slowest_rank']:.0f})" if is_slow else "")

    def _saved(self) -> Iterator[str]:
        """Yield the step of the last complete checkpoint, as its link says: a thread writes it."""
        if self._last_checkpoint is not None:
            with suppress(OSError):  # there is none yet
                yield f"saved step {step_of(self._last_checkpoint.readlink().name)}"

    def _epoch(self, report: StepInfo) -> str:
        last = "" if self._info.max_epochs is None else f"/{self._info.max_epochs - 1}"  # both are counted from 0
        return f"{report.epoch}{last}"

    def _left(self, report: StepInfo) -> str | None:
        rate, total = self._rate(), self._info.total_steps
        return str(timedelta(seconds=math.ceil(max(total - report.step, 0) / rate))) if rate and total else None

    def _rate(self) -> float | None:
        """Return steps per second over the last redraws, evaluations included."""
        (first_s, first_step), (last_s, last_step) = self._history[0], self._history[-1]
        return (last_step - first_step) / (last_s - first_s) if last_step > first_step and last_s > first_s else None


def _numbers(values: Mapping[str, float]) -> list[str]:
    return [f"{name.removeprefix('train/')} {value:.4g}" for name, value in values.items()]
