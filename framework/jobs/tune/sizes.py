"""Which batch sizes job=tune tries, and the training steps that a size makes."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from framework.data.batching import BatchPlan, plan_batches


def resolution(size: int) -> int:
    """Return how finely sizes near `size` are searched: a sixteenth of the power of two below it, 1 below 32."""
    return 1 << max(0, size.bit_length() - 5)


def largest_fitting(fits: Callable[[int], bool], *, start: int, most: int) -> int:
    """Return the largest size from 1 to `most` for which `fits`, to within `resolution`; 0 if 1 doesn't fit.

    Doubles from `start`, or halves if that is too large, then bisects the interval. No size is tried twice. Every rank
    must call it with the same numbers, and `fits` must return the same on all.
    """
    fitting = 0
    failing = most + 1
    size = min(start, most)
    while fitting < size < failing:
        if fits(size):
            fitting = size
            size = min(2 * size, most)
        else:
            failing = size
            size //= 2

    # The multiples of `step` between the two. Those that fit come first; about log2 of them are tried.
    step = resolution(fitting)
    next_multiple = fitting // step * step + step
    candidates = range(next_multiple, failing, step)
    num_fitting = bisect_left(candidates, True, key=lambda candidate: not fits(candidate))
    if num_fitting == 0:
        return fitting
    return candidates[num_fitting - 1]


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
