"""The learning-rate range test: real steps with a growing rate, the smoothed loss, a suggestion, and a plot.

L. N. Smith, Cyclical Learning Rates for Training Neural Networks, https://arxiv.org/abs/1506.01186, section 3.3.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import final

import torch

from framework.config.schema import TuneConfig
from framework.jobs.tune.batch_size import train_steps
from framework.training.meter import LOSS
from framework.training.trainer import Trainer

_SMOOTHING = 0.9
_SKIPPED = 10  # first steps, whose mean is of few losses
_LEAST_FALL = 0.05  # as a share of where the loss falls from
_TIMES_NOISE = 2.0  # of single losses: a flat smoothed curve wanders by about one
_BEGUN = 0.1  # the share of its fall after which the loss counts as falling


@dataclass(frozen=True)
class Point:
    """One step of the test."""

    lr: float
    loss: float  # over the global batch, before the step
    smoothed: float


@dataclass(frozen=True)
class Suggestion:
    """Learning rates: the one to use, where the loss starts to fall, and where it is lowest."""

    lr: float
    begins: float
    minimum: float


@final
class Curve:
    """The losses of a test and their bias-corrected exponential mean.

    threshold: the test has diverged if the smoothed loss exceeds its minimum by this factor; None: never.
    """

    def __init__(self, *, threshold: float | None) -> None:
        self.points: list[Point] = []
        self.stopped: str | None = None  # why the test ended early
        self._threshold = threshold
        self._mean = 0.0
        self._best = math.inf

    def add(self, lr: float, loss: float) -> bool:
        """Add the loss of one step, if it is finite. Return False if the test has to end."""
        if not math.isfinite(loss):
            self.stopped = f"the loss was {loss} at {lr:.2g}"
            return False
        self._mean = _SMOOTHING * self._mean + (1 - _SMOOTHING) * loss
        smoothed = self._mean / (1 - _SMOOTHING ** (len(self.points) + 1))
        self.points.append(Point(lr, loss, smoothed))
        self._best = min(self._best, smoothed)
        if self._threshold is None:
            return True
        # Losses may be negative, and the lowest one may be 0.
        limit = self._best + (self._threshold - 1) * (abs(self._best) or abs(self.points[0].loss))
        if smoothed > limit:
            self.stopped = f"the loss had risen to {smoothed:.3g} at {lr:.2g}, from {self._best:.3g}"
        return smoothed <= limit


def range_test(trainer: Trainer, settings: TuneConfig, *, on_step: Callable[[int], None]) -> Curve:
    """Train up to `settings.num_training` steps with rates from `min_lr` to `max_lr`, spaced evenly on a log scale.

    The rate is that of the optimizer's first group; the others keep their ratio to it. The loss is the mean over the
    global batch, so all ranks end the test at the same step. Every rank must call it. It changes the weights.
    """
    groups = trainer.state.optimizer.param_groups
    first = float(groups[0]["lr"])
    ratios = [float(group["lr"]) / first if first else 1.0 for group in groups]
    bounds = (math.log10(settings.min_lr), math.log10(settings.max_lr))
    lrs: list[float] = torch.logspace(*bounds, settings.num_training, dtype=torch.float64).tolist()
    curve = Curve(threshold=settings.early_stop_threshold)

    steps = train_steps(trainer, trainer.train_loader, settings.num_training)
    for step, lr in enumerate(lrs, start=1):
        for group, ratio in zip(groups, ratios, strict=True):
            group["lr"] = lr * ratio
        next(steps)
        on_step(step)
        if not curve.add(lr, trainer.read_means()[LOSS]):
            break
    return curve


def suggest(points: Sequence[Point]) -> Suggestion | None:
    """Return the rate at which the smoothed loss falls fastest, or None if it falls by no more than noise.

    Searched between where the fall begins and the minimum. docs/tune.md compares this rule with others.
    """
    points = points[_SKIPPED:]
    if len(points) < 3:
        return None
    lrs, losses = [point.lr for point in points], [point.smoothed for point in points]
    lowest = min(range(len(losses)), key=losses.__getitem__)
    high = max(losses[: lowest + 1])
    fall = high - losses[lowest]
    if fall <= max(_LEAST_FALL * abs(high), _TIMES_NOISE * _noise([point.loss for point in points[: lowest + 1]])):
        return None
    begins = max(place for place in range(lowest) if losses[place] >= high - _BEGUN * fall)
    inside = range(max(begins, 1), min(lowest, len(losses) - 2) + 1)
    steepest = min(inside, key=lambda place: losses[place + 1] - losses[place - 1], default=begins)
    return Suggestion(lr=lrs[steepest], begins=lrs[begins], minimum=lrs[lowest])


def _noise(losses: Sequence[float]) -> float:
    """Estimate the standard deviation of single losses from the median difference of neighbours.

    A fall of a few steps doesn't change the median. 0.6745 is the median of a normal distribution's absolute values.
    """
    steps = [abs(after - before) for before, after in pairwise(losses)]
    return median(steps) / (0.6745 * math.sqrt(2)) if steps else 0.0


def plot(points: Sequence[Point], suggestion: Suggestion | None, *, title: str) -> str:
    """Return the loss over the learning rate as SVG. Raises ModuleNotFoundError without matplotlib."""
    from matplotlib.figure import Figure  # pyplot would choose a backend and keep global state

    figure = Figure(figsize=(8.6, 4.8), layout="constrained")
    axes = figure.add_subplot(xscale="log", xlabel="learning rate", ylabel="loss")
    axes.set_title(title, parse_math=False)
    axes.grid(alpha=0.3)
    lrs, losses, smoothed = ([getattr(point, key) for point in points] for key in ("lr", "loss", "smoothed"))
    axes.plot(lrs, losses, ".", color="0.7")
    axes.plot(lrs, smoothed, linewidth=2)
    if suggestion is not None:
        for label, lr, color, style in (
            ("suggested", suggestion.lr, "C3", "-"),
            ("falls from", suggestion.begins, "C2", ":"),
            ("lowest at", suggestion.minimum, "0.5", "--"),
            ("a tenth of that", suggestion.minimum / 10, "0.5", ":"),
        ):
            axes.axvline(lr, color=color, linestyle=style, label=f"{label} {lr:.2g}")
        figure.legend(loc="outside lower center", ncols=4, frameon=False)
        # However far the loss rises after the fall, the fall must be visible.
        until = smoothed.index(min(smoothed)) + 1
        low, high = min(losses[:until]), max(smoothed[:until])
        axes.set_ylim(low - 0.12 * (high - low), high + 0.25 * (high - low))
    image = io.StringIO()
    figure.savefig(image, format="svg")
    return image.getvalue()
