"""Which batch sizes job=tune tries, and the training steps that a size makes."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from framework.data.batching import BatchPlan, plan_batches

# Tries of predicted sizes before the search goes on without predictions.
_MAX_PREDICTIONS = 5


def resolution(size: int) -> int:
    """Return how finely sizes near `size` are searched: a sixteenth of the power of two below it, 1 below 32."""
    return 1 << max(0, size.bit_length() - 5)


def largest_fitting(
    fits: Callable[[int], bool],
    *,
    start: int,
    most: int,
    predict: Callable[[], int | None] = lambda: None,
) -> int:
    """Return the largest size from 1 to `most` for which `fits`, to within `resolution`; 0 if 1 doesn't fit.

    Tries what `predict` returns, then the next larger or smaller size. If a few of these tries don't end the search, it
    doubles from `start`, or halves if that is too large, and bisects the interval: a wrong prediction costs trials, no
    more.

    No size is tried twice. Every rank must call it with the same numbers; `fits` and `predict` must return the same on
    all.

    Args:
        predict: returns the largest size that should fit, judging by what was tried so far; None if that is unknown.
    """
    fitting = 0
    failing = most + 1
    # How far below a predicted size that fails the next one lies.
    step_down = 0
    for _ in range(_MAX_PREDICTIONS):
        candidates = _candidates(fitting, failing)
        predicted = predict()
        if predicted is None or not candidates:
            break
        if failing <= most and predicted >= failing:
            is_far_off = predicted > 2 * failing
            if is_far_off:
                break
            step_down = max(2 * step_down, resolution(failing))
            predicted = failing - step_down
        size = min(predicted, failing - 1)
        if size < most:
            size -= size % resolution(size)
        size = max(size, candidates[0])
        if fits(size):
            fitting = size
        else:
            failing = size

    size = min(2 * fitting, most)
    if fitting == 0:
        size = min(start, failing - 1)
    while fitting < size < failing:
        if fits(size):
            fitting = size
            size = min(2 * size, most)
        else:
            failing = size
            size //= 2

    # Those that fit come first; about log2 of the candidates are tried.
    candidates = _candidates(fitting, failing)
    num_fitting = bisect_left(candidates, True, key=lambda candidate: not fits(candidate))
    if num_fitting == 0:
        return fitting
    return candidates[num_fitting - 1]


def _candidates(fitting: int, failing: int) -> range:
    """Return the sizes between one that fits and one that doesn't, as finely as they are searched."""
    step = resolution(fitting)
    next_multiple = fitting // step * step + step
    return range(next_multiple, failing, step)


@dataclass(frozen=True)
class Forecast:
    """The memory that a step is forecast to take besides the model, for batches of several sizes."""

    # Samples and bytes, in the order of samples.
    points: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, points: Iterable[Sequence[int]]) -> Forecast:
        """Return the forecast with these pairs of samples and bytes."""
        return cls(tuple(sorted((size, size_bytes) for size, size_bytes in points)))

    def with_point(self, size: int, size_bytes: int) -> Forecast:
        return Forecast.of([*self.points, (size, size_bytes)])

    def largest(self, room_bytes: int) -> int | None:
        """Return the largest batch that takes at most `room_bytes`; None if the memory doesn't grow with the batch.

        A peak is the largest of several lines over the batch. So the line through two neighbouring points is never
        below it between them, and never above it outside.
        """
        if len(self.points) < 2:
            return None
        # The last two points below the room, or the one below and the one above, or the first two.
        index = 1
        while index < len(self.points) - 1 and self.points[index][1] <= room_bytes:
            index += 1
        (size, size_bytes), (larger, larger_bytes) = self.points[index - 1 : index + 1]
        if larger_bytes <= size_bytes:
            return None
        return max(0, size + (room_bytes - size_bytes) * (larger - size) // (larger_bytes - size_bytes))


class Forecasts(NamedTuple):
    """The forecast as configured, and with recomputing."""

    plain: Forecast = Forecast(())
    recomputing: Forecast = Forecast(())


@dataclass(frozen=True)
class BatchSizing:
    """Plan steps for any batch size.

    The number of processes stays the same, and so does the global batch, or the accumulation if none is set.
    """

    world_size: int
    # Forward passes per step, unless there is a global batch.
    accumulate: int
    global_batch_size: int | None
    # In the dataset.
    samples: int

    def most(self, limit: int | None) -> tuple[int, str]:
        """Return the largest sensible batch of one pass, and what limits it: a key, or "data"."""
        if self.global_batch_size is None:
            passes_per_step = self.world_size * self.accumulate
            limits = {"data": max(1, self.samples // passes_per_step)}
        else:
            limits = {
                "data.global_batch_size": _share(self.global_batch_size, self.world_size),
                "data": _share(self.samples, self.world_size),
            }
        if limit is not None:
            limits["tune.max_batch_size"] = limit
        limited_by = min(limits, key=lambda key: limits[key])
        return limits[limited_by], limited_by

    def passes(self, size: int) -> int:
        """Return the trainer.accumulate_grad_batches with which no pass has more than `size` samples."""
        if self.global_batch_size is None:
            return self.accumulate
        return math.ceil(_share(self.global_batch_size, self.world_size) / size)

    def pass_size(self, size: int) -> int:
        """Return the samples of the largest pass if at most `size` fit: a global batch is split evenly."""
        if self.global_batch_size is None:
            return size
        return math.ceil(_share(self.global_batch_size, self.world_size) / self.passes(size))

    def trial(self, size: int) -> BatchPlan:
        """Return a step to try `size` with. Two passes need as much memory as any larger number."""
        passes = min(self.passes(size), 2)
        return BatchPlan(self.pass_size(size) * self.world_size * passes, passes, self.world_size)

    def plan(self, size: int) -> BatchPlan:
        """Return the run's steps with `size`. Raises ConfigError if the global batch can't be split so finely."""
        return plan_batches(
            batch_size=size,
            global_batch_size=self.global_batch_size,
            world_size=self.world_size,
            accumulate=self.passes(size),
        )

    def overrides(self, size: int) -> dict[str, float]:
        """Return the key to set for `size`, and its value."""
        if self.global_batch_size is None:
            return {"data.batch_size": size}
        return {"trainer.accumulate_grad_batches": self.passes(size)}


def _share(samples: int, world_size: int) -> int:
    """Return how many of the samples one process gets at most."""
    return math.ceil(samples / world_size)
