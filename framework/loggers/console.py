"""Progress on rank 0's standard output: a redrawn line on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import math
import re
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any, final

from framework.launch.child import Tee
from framework.types import FitInfo, StepReport

if TYPE_CHECKING:
    from rich.progress import Progress

_REDRAW_S = 0.25
_PLAIN_LINE_S = 5.0
_RATE_WINDOW = 120  # redraws the rate is taken over: half a minute on a terminal
_EVALUATED = ("val/", "test/")
_TRAINING = re.compile(r"train/(.+/)?loss|train/lr")  # the losses of phases, too


@final
class ConsoleLogger:
    """Show epoch, step, steps per second, time left, the last loss and learning rate; a line per evaluation.

    Epochs are counted from 0, as everywhere: the last of 10 is `epoch 9/9`. Steps are optimizer steps done.

    There is no drawing thread: `step` keeps the report and looks at the clock (0.1 µs); it draws four times a second
    on a terminal (0.3 ms), every five seconds elsewhere. It never reads a tensor.
    """

    def __init__(self, redraws: bool = True) -> None:
        """redraws: if False, print plain lines on a terminal too: they don't disturb a debugger's prompt."""
        self._redraws = redraws
        self._out: Any = sys.stdout  # a Tee in a rank that was forked: no TextIO for the type checker
        self._bar: Progress | None = None
        self._info: FitInfo
        self._report: StepReport | None = None
        self._history: deque[tuple[float, int]] = deque(maxlen=_RATE_WINDOW)  # time and step of each line
        self._training: dict[str, float] = {}

    def fit_start(self, info: FitInfo) -> None:
        self._info = info
        self._history.append((monotonic(), info.start_step))
        self._bar = _start_bar(info.total_steps) if self._redraws else None
        self._next_draw_s = monotonic() + (_PLAIN_LINE_S if self._bar is None else _REDRAW_S)

    def step(self, report: StepReport) -> None:
        self._report = report
        if monotonic() >= self._next_draw_s:
            self._draw(report)

    def metrics(self, values: Mapping[str, float], *, step: int, epoch: int) -> None:
        evaluation = {name: value for name, value in values.items() if name.startswith(_EVALUATED)}
        training = {name: value for name, value in values.items() if _TRAINING.fullmatch(name)}
        self._training.update({name.removeprefix("train/"): value for name, value in training.items()})
        if evaluation:
            self._print(f"epoch {epoch}  step {step}  {_numbers(evaluation)}")

    def text(self, tag: str, text: str) -> None:
        """Do nothing: texts are for TensorBoard."""

    def close(self) -> None:
        """Show the last state and restore the terminal; may be called again."""
        if self._report is not None and (self._bar is not None or self._report.step != self._history[-1][1]):
            self._draw(self._report)
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _line(self, report: StepReport) -> str:
        step, rate, total = report.step, self._rate(), self._info.total_steps
        last = "" if self._info.max_epochs is None else f"/{self._info.max_epochs - 1}"  # both are counted from 0
        parts = [f"epoch {report.epoch}{last}", f"step {step}" + (f"/{total}" if total else "")]
        if rate:
            parts.append(f"{rate:.4g} steps/s")
        if rate and total:
            parts.append(f"ETA {timedelta(seconds=math.ceil(max(total - step, 0) / rate))}")
        parts.append(_numbers(self._training))
        return "  ".join(part for part in parts if part)

    def _draw(self, report: StepReport) -> None:
        self._history.append((monotonic(), report.step))
        line = self._line(report)
        if self._bar is None:
            self._print(line)
        else:
            self._bar.update(self._bar.task_ids[0], completed=report.step, description=line, refresh=True)
        self._next_draw_s = self._history[-1][0] + (_PLAIN_LINE_S if self._bar is None else _REDRAW_S)

    def _rate(self) -> float | None:
        """Return steps per second over the last redraws, evaluations included."""
        (first_s, first_step), (last_s, last_step) = self._history[0], self._history[-1]
        return (last_step - first_step) / (last_s - first_s) if last_step > first_step and last_s > first_s else None

    def _print(self, line: str) -> None:
        if self._bar is None:
            with suppress(OSError):  # a full disk or a broken pipe must not end training
                print(line, file=self._out, flush=True)
            return
        self._bar.console.print(line, highlight=False)  # above the line that is redrawn
        if isinstance(self._out, Tee):
            self._out.write_log(f"{line}\n")


def _start_bar(total: int | None) -> Progress | None:
    """Return a line with a bar that is redrawn; None if standard output isn't a terminal that can do that."""
    if not sys.stdout.isatty():
        return None
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    # On the terminal alone: the log, which gets what is printed too, would hold every redraw.
    out: Any = sys.stdout
    console = Console(file=out.terminal if isinstance(out, Tee) else out)
    if not console.is_terminal or console.is_dumb_terminal:
        return None
    text = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))
    bar = Progress(BarColumn(20), text, console=console, auto_refresh=False)
    bar.add_task("", total=total)
    bar.start()
    return bar


def _numbers(values: Mapping[str, float]) -> str:
    return " ".join(f"{name} {value:.4g}" for name, value in values.items())
