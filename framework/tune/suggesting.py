"""What a learning-rate range test says: the curve of its losses, when to stop, and which rate to take. No torch.

L. N. Smith, Cyclical Learning Rates for Training Neural Networks, https://arxiv.org/abs/1506.01186, section 3.3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import final

SMOOTHING = 0.9

_SKIPPED = 10  # steps at the beginning, whose mean is of few
_LEAST_FALL = 0.05  # a share of where it falls from
_TIMES_NOISE = 2.0  # of single losses: a smoothed curve that is flat wanders by about one
_BEGUN = 0.1  # the share of its fall from which on a curve has begun to fall


@dataclass(frozen=True)
class Point:
    """One step. loss: over the global batch, before the step. smoothed: None where the loss wasn't finite."""

    lr: float
    loss: float
    smoothed: float | None


@dataclass(frozen=True)
class Suggestion:
    """Learning rates. lr: the one to take. begins: where the loss begins to fall. minimum: where it is lowest."""

    lr: float
    begins: float
    minimum: float


@final
class Curve:
    """The points of a test, smoothed by a mean in which each step weighs `SMOOTHING` times what the next one does.

    threshold: the test has diverged where the smoothed loss is so many times its lowest; None: it never has.
    """

    def __init__(self, *, threshold: float | None) -> None:
        self.points: list[Point] = []
        self.stopped: str | None = None  # why, in words
        self._threshold = threshold
        self._mean = 0.0
        self._best = math.inf
        self._first = 0.0

    def add(self, lr: float, loss: float) -> bool:
        """Take in one step's loss; whether to go on."""
        if not math.isfinite(loss):
            self.points.append(Point(lr, loss, None))
            self.stopped = f"the loss was {loss} at {lr:.2g}"
            return False
        self._mean = SMOOTHING * self._mean + (1 - SMOOTHING) * loss
        smoothed = self._mean / (1 - SMOOTHING ** (len(self.points) + 1))
        self.points.append(Point(lr, loss, smoothed))
        if len(self.points) == 1:
            self._first = smoothed
        self._best = min(self._best, smoothed)
        if self._threshold is not None and smoothed > self._limit(self._threshold):
            self.stopped = f"the loss had risen to {smoothed:.3g} at {lr:.2g}, from {self._best:.3g}"
            return False
        return True

    def _limit(self, threshold: float) -> float:
        """`threshold` times the lowest; of losses that aren't above 0 as much above it."""
        return self._best + (threshold - 1) * (abs(self._best) or abs(self._first))


def suggest(points: Sequence[Point]) -> Suggestion | None:
    """What the smoothed curve suggests: the rate at which the loss falls fastest. None where it falls by no more than
    noise.

    Of the rules in use it is the one that came nearest to the best rate where that was known; see docs/tune.md. Looked
    for is it between where the fall begins and where the loss is lowest.
    """
    known = [(point.lr, point.loss, point.smoothed) for point in points[_SKIPPED:] if point.smoothed is not None]
    if len(known) < 3:
        return None
    lrs, losses = [lr for lr, _, _ in known], [smoothed for _, _, smoothed in known]
    lowest = min(range(len(losses)), key=losses.__getitem__)
    high = max(losses[: lowest + 1])
    fall = high - losses[lowest]
    if fall <= max(_LEAST_FALL * abs(high), _TIMES_NOISE * _noise([loss for _, loss, _ in known[: lowest + 1]])):
        return None
    begins = max(place for place in range(lowest) if losses[place] >= high - _BEGUN * fall)
    inside = range(max(begins, 1), min(lowest, len(losses) - 2) + 1)
    steepest = min(inside, key=lambda place: losses[place + 1] - losses[place - 1], default=begins)
    return Suggestion(lr=lrs[steepest], begins=lrs[begins], minimum=lrs[lowest])


def _noise(losses: Sequence[float]) -> float:
    """The standard deviation of single losses, from what they differ by from one to the next: the median of that, which
    a fall of some steps doesn't move. 0.6745 is a normal distribution's."""
    steps = [abs(after - before) for before, after in pairwise(losses)]
    return median(steps) / (0.6745 * math.sqrt(2)) if steps else 0.0
