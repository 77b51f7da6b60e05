"""What training logs: noted in every step, reduced over ranks once per log, then given to the loggers.

Noting costs a step next to nothing: tensors stay on their device until `reduce`. All that ranks exchange for a log
(sums of losses and metrics, times, memory, what each rank wants to be done) is one collective of one flat tensor.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, final

from torch import Tensor

from framework.config.schema import TrainerConfig
from framework.distributed.collectives import any_over_ranks
from framework.errors import TargetError
from framework.loggers.encoding import Encoder
from framework.loggers.media import log_to_loggers
from framework.media import Drawing, Media, Text
from framework.monitoring.device_usage import DeviceUsage
from framework.monitoring.slow_ranks import SlowRanks
from framework.system.rank_log import warn
from framework.training.evaluation import Evaluation
from framework.training.flops import FlopRate
from framework.training.meter import bad_loss, is_loss
from framework.training.step_output import is_number, is_pair, media_of
from framework.training.step_times import SHARES, StepTimer, Throughput
from framework.training.train_state import TrainState
from framework.types import Interval, Log, hooks, is_logged_by_training

# Pictures of evaluations are drawn and logged at most this often. One costs as much as 50 steps of a small model.
_DRAW_EVERY_S = 5.0


class Actions(NamedTuple):
    """What is to be done after a log. All ranks do what any of them wants."""

    # Stop training, for a callback.
    stop: bool
    # Save a checkpoint, by the clock.
    save: bool
    # Rebuild what depends on the trained parameters, since `requires_grad` has changed.
    rebuild: bool


class RankFigures(NamedTuple):
    """What a rank adds to the reduction, beside losses and metrics; afterwards, the sums over ranks."""

    # For each action: the number of ranks that want it.
    stops: float
    saves: float
    rebuilds: float
    # The number of ranks with pairs (sum, count) that callbacks have returned.
    with_pairs: float
    # See `StepTimer.shares`, `DeviceUsage.row` and `SlowRanks.row`.
    shares: Sequence[float]
    memory_gb: Sequence[float]
    times: Sequence[float]

    def flat(self) -> list[float]:
        counts = (self.stops, self.saves, self.rebuilds, self.with_pairs)
        return [*counts, *self.shares, *self.memory_gb, *self.times]

    def from_flat(self, numbers: Sequence[float]) -> RankFigures:
        """Return figures of these numbers, which are in the order of `flat` and as many as this rank's own."""
        remaining = iter(numbers)
        return RankFigures(
            stops=next(remaining),
            saves=next(remaining),
            rebuilds=next(remaining),
            with_pairs=next(remaining),
            shares=list(islice(remaining, len(self.shares))),
            memory_gb=list(islice(remaining, len(self.memory_gb))),
            times=list(islice(remaining, len(self.times))),
        )


class Reduction(NamedTuple):
    """What a log has learned of all ranks, the same on each."""

    # Means of losses and metrics by name.
    means: dict[str, float]
    figures: RankFigures

    @property
    def actions(self) -> Actions:
        """What at least one rank wants."""
        figures = self.figures
        return Actions(stop=figures.stops > 0, save=figures.saves > 0, rebuild=figures.rebuilds > 0)


class DrawingOfStep(NamedTuple):
    """A drawing that isn't logged yet, and the step that it shows."""

    drawing: Drawing
    step: int
    epoch: int


@final
class Logbook:
    """Notes what steps compute, and writes it to the loggers. Every rank has one; only rank 0 has loggers."""

    def __init__(self, state: TrainState, settings: TrainerConfig, *, timer: StepTimer, flops: FlopRate) -> None:
        self._state = state
        self._progress = state.progress
        self._context = state.context
        self._every = settings.log_every_n_steps
        self._timer = timer
        self._flops = flops
        self._usage = DeviceUsage(state.context)
        self._logged_hooks = hooks([state.task], "logged")
        # False: a loss that isn't finite doesn't end training. For jobs that repeat the steps of a run.
        self.refuses_bad_losses = True
        self.slow_ranks = SlowRanks(rank=state.context.rank, world_size=state.context.world_size)
        self.throughput = Throughput()
        # Of the last step. The schedule has moved on when they are logged.
        self.lrs: list[float] = []
        # By the names they are logged under.
        self.grad_norms: dict[str, Tensor] = {}
        # The functions that make the media of the step that is logged next, by the prefix of their names.
        self._media: dict[str, Callable[[], Mapping[str, Media]]] = {}
        # The newest drawings of evaluations, by name, and when they are logged, by `time.monotonic`.
        self._drawings: dict[str, DrawingOfStep] = {}
        self._drawings_due_s = 0.0
        self._encoder = Encoder()

    def is_due(self, step: int) -> bool:
        """Return True if a log follows once `step` steps are done."""
        return step % self._every == 0

    def keep_media(self, media: Callable[[], Mapping[str, Media]], *, objective: str) -> None:
        """Keep a step's media, if the step will be logged and this rank has loggers."""
        if self._state.loggers and self.is_due(self._progress.step + 1):
            self._media[_train_prefix(objective)] = media

    def has_media(self, *, objective: str) -> bool:
        return _train_prefix(objective) in self._media

    # One log

    def reduce(self, wanted: Actions) -> Reduction:
        """Reduce over ranks what the last steps have computed, and what ranks want to be done.

        Every rank must call it; waits for the device. Raises RunError if ranks have metrics of different names.
        """
        times = self.slow_ranks.row(self._timer.read())
        figures = RankFigures(
            stops=float(wanted.stop),
            saves=float(wanted.save),
            rebuilds=float(wanted.rebuild),
            with_pairs=float(bool(self._state.reported)),
            shares=self._timer.shares,
            memory_gb=self._usage.row(),
            times=times,
        )
        reduced = self._state.meter.reduce(self._context, extra=figures.flat())
        return Reduction(reduced.means, figures.from_flat(reduced.extra))

    def check_losses(self, means: Mapping[str, float]) -> None:
        """Raise NotFiniteError if a loss was NaN or infinite since the last log. Every rank must call it."""
        if not self.refuses_bad_losses:
            return
        for name, mean in means.items():
            if is_loss(name) and not math.isfinite(mean):
                step = self._state.meter.first_nonfinite_step(self._context)
                raise bad_loss(mean, step=step, epoch=self._progress.last_epoch)

    def write(self, reduction: Reduction) -> None:
        """Give a log to the loggers, and begin the next one. Every rank must call it."""
        if reduction.figures.with_pairs:
            self.log_pairs("train")
        if not reduction.means:
            return

        values = self._step_values(reduction.means)
        usage = {}
        if self._state.loggers:
            usage = self._usage.values(reduction.figures.memory_gb)
        self.log_values(values | self.task_values("step") | self._time_values(reduction.figures) | usage)

        for prefix, make_media in self._media.items():
            self.log_values({f"{prefix}{name}": value for name, value in media_of(make_media).items()})
        self._media.clear()
        self._log_drawings_if_due()

    def _step_values(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return losses, metrics, learning rates, gradient norms and speed, under the names that are logged."""
        values = dict(means)
        for group, lr in zip(self._state.optimizer.param_groups, self.lrs, strict=True):
            values[f"lr/{group.get('name', '')}".rstrip("/")] = float(lr)
        for name, norm in self.grad_norms.items():
            values[name] = float(norm)
        self.grad_norms.clear()

        steps_per_s, samples_per_s = self.throughput.read(step=self._progress.step)
        values["steps_per_s"] = steps_per_s
        values["samples_per_s"] = samples_per_s
        for unit, number in getattr(self._state.task, "per_sample", {}).items():
            values[f"{unit}_per_s"] = samples_per_s * number
        values |= self._flops.values(samples_per_s)
        return {f"train/{name}": value for name, value in values.items()}

    def _time_values(self, figures: RankFigures) -> dict[str, float]:
        """Return where the ranks' time goes, on rank 0; warn of a rank that is newly slow."""
        if not self._context.is_main:
            return {}
        values = self.slow_ranks.note(figures.times, step=self._progress.step)
        if self.slow_ranks.news is not None:
            warn(self.slow_ranks.news)
            self.log_values({"slow_rank": Text(self.slow_ranks.news)})
        if values:
            for name, summed in zip(SHARES, figures.shares, strict=True):
                values[f"time/{name}"] = summed / self._context.world_size
        return values

    # What callbacks and tasks log

    def add(self, log: Log, *, part: str) -> None:
        """Log the values that a callback has returned. Pairs (sum, count) wait until `log_pairs` reduces them.

        Raises TargetError for a name that the framework logs itself.
        """
        values: dict[str, Any] = {}
        logged: Mapping[str, Any] = log.values
        for name, value in logged.items():
            full_name = f"{part}/{name}"
            if part == "train" and is_logged_by_training(name):
                raise TargetError(
                    f"A callback logs {name!r}, and the framework logs {full_name} itself. Use another name."
                )
            if is_pair(value):
                self._state.reported.add(full_name, (value[0], value[1]))
            elif not is_number(value):
                values[full_name] = value
            elif self._context.is_main:
                # On rank 0 only: reading a tensor waits for its device.
                values[full_name] = float(value)
        self.log_values(values)

    def log_pairs(self, part: str) -> None:
        """Reduce the pairs of a part (`train` or `val`) over ranks and log their means. Every rank must call it."""
        self.log_values(self._state.reported.reduce(self._context, prefix=f"{part}/"))

    def any_pairs(self) -> bool:
        """Return True if any rank has pairs to reduce. Every rank must call it."""
        return any_over_ranks(bool(self._state.reported), self._context)

    def task_values(self, interval: Interval) -> dict[str, float]:
        """Return the metrics that the task reduces itself. Every rank must call it."""
        values = {}
        for logged in self._logged_hooks:
            for name, value in logged(interval).items():
                values[f"train/{name}"] = value
        return values

    # What evaluations find

    def log_evaluation(self, evaluation: Evaluation) -> None:
        """Log numbers, tables and media. Drawings wait until they are due; a newer one of the name replaces them."""
        self.log_values(evaluation.metrics)
        self.log_values(evaluation.texts)
        media: dict[str, Media] = {}
        for name, value in evaluation.media.items():
            if isinstance(value, Drawing):
                self._drawings[name] = DrawingOfStep(value, self._progress.step, self._progress.last_epoch)
            else:
                media[name] = value
        self.log_values(media)
        self._log_drawings_if_due()

    def _log_drawings_if_due(self) -> None:
        if self._drawings and time.monotonic() >= self._drawings_due_s:
            self.log_drawings()
            self._drawings_due_s = time.monotonic() + _DRAW_EVERY_S

    def log_drawings(self) -> None:
        """Log the drawings that wait, each with its own step."""
        drawings = self._drawings
        self._drawings = {}
        for name, (drawing, step, epoch) in drawings.items():
            self._log({name: drawing}, step=step, epoch=epoch)

    def close(self) -> None:
        """Log the drawings that wait, and wait until images are encoded. Call it before the loggers are closed."""
        try:
            self.log_drawings()
        finally:
            self._encoder.close()

    # To the loggers

    def log_values(self, values: Mapping[str, Any]) -> None:
        """Give numbers and media of the last step done to the loggers. Raises TargetError for any other value."""
        if values:
            progress = self._progress
            self._log(values, step=progress.step, epoch=progress.last_epoch)

    def _log(self, values: Mapping[str, Any], *, step: int, epoch: int) -> None:
        log_to_loggers(self._state.loggers.values(), self._encoder.prepared(values), step=step, epoch=epoch)

    def flush(self) -> None:
        """Make what is logged so far survive a kill."""
        for flush in hooks(self._state.loggers.values(), "flush"):
            flush()


def _train_prefix(objective: str) -> str:
    """Return what precedes the names of a training step's media. objective: "" if the task has a single loss."""
    if objective:
        return f"train/{objective}/"
    return "train/"
