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
from framework.loggers.media import split
from framework.media import Media
from framework.monitoring.slow_ranks import SLOW_SHARE
from framework.system.formatting import format_bytes, format_rate
from framework.system.run_dir import RunDir
from framework.types import FitInfo, Logger, StepInfo

if TYPE_CHECKING:
    from framework.loggers.live_view import LiveView, Row

_REDRAW_S = 0.25
_PLAIN_LINE_S = 5.0
# The rate is that of so many redraws: of half a minute on a terminal.
_RATE_WINDOW = 120
_EVALUATED = ("val/", "test/")
# The losses of a task's objectives are shown, too.
_IN_PLAIN_LINES = re.compile(r"train/(.+/)?loss|train/lr")
_RATE = "_per_s"
# Metrics shown as shares of the time, and their labels.
_SHARES = {"device/utilization": "GPU", "time/data": "data", "time/waiting": "waiting"}


@final
class ConsoleLogger(Logger):
    """Show progress, losses and metrics, rates, memory and the last checkpoint; print a line for each evaluation.

    Epochs are counted from 0, as everywhere: the last of 10 is `epoch 9/9`. Steps are optimizer steps done.

    There is no drawing thread: `on_train_step_end` keeps the step and looks at the clock (0.1 µs); it draws four times
    a second on a terminal (0.4 ms), every five seconds elsewhere. It never reads a tensor.
    """

    def __init__(self, progress: ProgressMode = "auto", *, run_dir: RunDir | None = None) -> None:
        """progress: as `trainer.progress`."""
        self._progress = progress
        self._last_checkpoint = None if run_dir is None else run_dir.checkpoints / LAST
        # In a rank that was forked, standard output is a Tee, which is no TextIO for the type checker.
        self._out: Any = sys.stdout
        self._view: LiveView | None = None

        # What training has reached.
        self._fit: FitInfo
        self._last_step: StepInfo | None = None
        # The time and the step of each redraw.
        self._history: deque[tuple[float, int]] = deque(maxlen=_RATE_WINDOW)

        # The last value of each metric of training.
        self._training: dict[str, float] = {}
        # The metrics of the last evaluation, after step `_evaluated_step`.
        self._evaluated: dict[str, float] = {}
        self._evaluated_step = 0

    def start(self, info: FitInfo) -> None:
        self._fit = info
        self._history.append((monotonic(), info.start_step))
        if self._progress == "rich" or (self._progress == "auto" and self._out.isatty()):
            from framework.loggers.live_view import start_view

            self._view = start_view(self._progress)
        if self._view is not None:
            self._show_start(self._view)
        self._schedule_draw()

    def on_train_step_end(self, info: StepInfo) -> None:
        self._last_step = info
        if monotonic() >= self._next_draw_s:
            self._draw(info)

    def log(self, values: Mapping[str, float | Media], *, step: int, epoch: int) -> None:
        numbers, _ = split(values)
        evaluated = {}
        for name, value in numbers.items():
            if name.startswith(_EVALUATED):
                evaluated[name] = value
            else:
                self._training[name] = value

        if evaluated:
            self._evaluated = evaluated
            self._evaluated_step = step
            self._print(f"epoch {epoch}  step {step}  {' '.join(_metrics(evaluated))}")

    def close(self) -> None:
        """Show the last state and restore the terminal; may be called again."""
        if self._last_step is not None:
            is_drawn = self._last_step.step == self._history[-1][1]
            if self._view is not None or not is_drawn:
                self._draw(self._last_step, is_last=True)
        if self._view is not None:
            self._view.stop()
            self._view = None

    # When and where to draw

    def _schedule_draw(self) -> None:
        if self._progress == "off":
            self._next_draw_s = math.inf
        elif self._view is None:
            self._next_draw_s = monotonic() + _PLAIN_LINE_S
        else:
            self._next_draw_s = monotonic() + _REDRAW_S

    def _show_start(self, view: LiveView) -> None:
        """Show that the first step has begun, which may load and compile much."""
        from framework.loggers.live_view import Row

        start = self._fit.start_step
        total = self._fit.total_steps
        place = f"{start}/{total}" if total else f"step {start}"
        view.show([Row("total", [place, "first step …"], done=start, of=total)])

    def _draw(self, info: StepInfo, *, is_last: bool = False) -> None:
        self._history.append((monotonic(), info.step))
        if self._view is None:
            self._print(self._line(info, is_last=is_last))
        else:
            self._view.show(self._rows(info, is_last=is_last))
        self._schedule_draw()

    def _print(self, line: str) -> None:
        if self._progress == "off":
            return
        # With a view, sys.stdout prints above it.
        out = self._out if self._view is None else sys.stdout
        print(line, file=out, flush=True)

    # What to draw

    def _line(self, info: StepInfo, *, is_last: bool) -> str:
        """Return a plain line: the place in the training, the rate, the losses and the learning rate."""
        total = self._fit.total_steps
        items = [f"epoch {self._epoch(info)}"]
        items.append(f"step {info.step}/{total}" if total else f"step {info.step}")

        rate = self._rate()
        if rate:
            items.append(f"{rate:.4g} steps/s")
        time_left = self._time_left(info)
        if time_left and not is_last:
            items.append(f"ETA {time_left}")

        shown = {name: value for name, value in self._training.items() if _IN_PLAIN_LINES.fullmatch(name)}
        if shown:
            items.append(" ".join(_metrics(shown)))
        return "  ".join(items)

    def _rows(self, info: StepInfo, *, is_last: bool) -> Iterator[Row]:
        """Yield what the live view shows; the most important items of a row come first."""
        from framework.loggers.live_view import Row

        if self._fit.steps_per_epoch:
            done = self._steps_of_epoch(info, self._fit.steps_per_epoch)
            place = f"{done}/{self._fit.steps_per_epoch}"
            yield Row(f"epoch {self._epoch(info)}", [place], done=done, of=self._fit.steps_per_epoch)

        total = self._fit.total_steps
        places = [f"{info.step}/{total}" if total else f"step {info.step}"]
        time_left = self._time_left(info)
        if time_left and not is_last:
            places.append(f"{time_left} left")
        yield Row("total", places, done=info.step, of=total)

        yield Row("train", _metrics(self._training_metrics()))
        if self._evaluated:
            yield Row("evaluated", [*_metrics(self._evaluated), f"at step {self._evaluated_step}"])
        yield Row("speed", list(self._speed()))
        yield Row("state", list(self._state()))

    def _steps_of_epoch(self, info: StepInfo, steps_per_epoch: int) -> int:
        """Return how many steps of its epoch are done. Earlier epochs may have had other numbers of steps."""
        next_epoch_start = self._fit.start_step + (self._fit.steps_left_in_epoch or 0)
        return (info.step - 1 - next_epoch_start) % steps_per_epoch + 1

    def _training_metrics(self) -> dict[str, float]:
        """Return losses, learning rates and the like, without what the row `speed` has."""
        metrics = {}
        for name, value in self._training.items():
            is_speed = name.endswith((_RATE, "/mfu"))
            if name.startswith("train/") and not is_speed:
                metrics[name] = value
        return metrics

    def _speed(self) -> Iterator[str]:
        values = self._training
        steps_per_s = self._rate()
        if steps_per_s:
            yield f"{steps_per_s:.4g} steps/s"

        rates = {name.removeprefix("train/"): value for name, value in values.items() if name.endswith(_RATE)}
        rates.pop(f"steps{_RATE}", None)
        tflop_per_s = rates.pop(f"tflop{_RATE}", None)
        if len(rates) > 1:
            # The task's own rate, such as tokens per second, says more.
            rates.pop(f"samples{_RATE}", None)
        for name, value in rates.items():
            rate = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
            yield f"{rate} {name.removesuffix(_RATE)}/s"

        if "train/mfu" in values:
            yield f"MFU {values['train/mfu']:.0%}"
        elif tflop_per_s is not None:
            yield format_rate(tflop_per_s * 1e12, "FLOP/s")

        for name, label in _SHARES.items():
            if name in values:
                yield f"{label} {values[name]:.0%}"

        skew = values.get("skew/worst")
        if skew is not None and skew >= SLOW_SHARE:
            yield f"skew {skew:.0%} (rank {values['skew/slowest_rank']:.0f})"
        elif skew is not None:
            yield f"skew {skew:.0%}"

    def _state(self) -> Iterator[str]:
        """Yield the memory, and the step of the last complete checkpoint as its link says: a thread writes it."""
        memory_gb = self._training.get("device/memory_gb")
        if memory_gb is not None:
            yield f"memory {format_bytes(memory_gb * 1e9)}"
        if self._last_checkpoint is not None:
            # There may be none yet.
            with suppress(OSError):
                yield f"saved step {step_of(self._last_checkpoint.readlink().name)}"

    def _epoch(self, info: StepInfo) -> str:
        """Return the epoch and the last one, both counted from 0."""
        if self._fit.max_epochs is None:
            return str(info.epoch)
        return f"{info.epoch}/{self._fit.max_epochs - 1}"

    def _time_left(self, info: StepInfo) -> str | None:
        rate = self._steps_per_s()
        total = self._fit.total_steps
        if not rate or not total:
            return None
        steps_left = max(total - info.step, 0)
        return str(timedelta(seconds=math.ceil(steps_left / rate)))

    def _rate(self) -> float | None:
        """Return the steps per second without evaluations, as of the last log; before the first one, as seen here."""
        logged = self._training.get("train/steps_per_s")
        return self._steps_per_s() if logged is None else logged

    def _steps_per_s(self) -> float | None:
        """Return the rate over the last redraws, evaluations included."""
        first_s, first_step = self._history[0]
        last_s, last_step = self._history[-1]
        if last_step <= first_step or last_s <= first_s:
            return None
        return (last_step - first_step) / (last_s - first_s)


def _metrics(values: Mapping[str, float]) -> list[str]:
    return [f"{name.removeprefix('train/')} {value:.4g}" for name, value in values.items()]
