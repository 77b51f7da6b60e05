"""The length of each epoch, in samples and in optimizer steps: that of the dataset, or what the sampler says.

Pure arithmetic, the same on every rank. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from numbers import Integral
from typing import Any, final

from framework.data.batching import BatchPlan, count_windows
from framework.errors import DataError
from framework.types import Sampler


@final
class EpochSizes:
    """The samples of each epoch: those of the dataset, or as many as its sampler orders.

    Raises DataError for a sampler that has neither `__len__` nor `length(epoch)`.
    """

    def __init__(self, num_samples: int, sampler: Sampler | None = None) -> None:
        self._kind = type(sampler).__name__
        self._length = _length_of_epoch(sampler)
        self.constant: int | None = None
        """Samples of every epoch; None if epochs differ."""
        if self._length is None:
            self.constant = num_samples if sampler is None else _same_length(sampler)

    def of(self, epoch: int) -> int:
        """Return the samples of an epoch. Raises DataError unless `length(epoch)` is the same number when repeated."""
        if self._length is None:
            assert self.constant is not None
            return self.constant
        size: Any = self._length(epoch)
        again = self._length(epoch)
        # NumPy's integers count as such.
        if not isinstance(size, Integral) or size < 1:
            raise DataError(
                f"{self._kind}.length({epoch}) returned {size!r}. It must return the samples of that epoch, 1 or more."
            )
        if size != again:
            raise DataError(
                f"{self._kind}.length({epoch}) returned {size}, and {again} when it was called again. It must depend "
                "on the epoch alone, since every process asks for itself."
            )
        return int(size)


def takes_epoch(method: Callable[..., Any]) -> bool:
    """Return True if a method of a sampler has a parameter `epoch`, or takes any keyword."""
    parameters = signature(method).parameters.values()
    return any(parameter.name == "epoch" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _length_of_epoch(sampler: Any) -> Callable[[int], int] | None:
    """Return the sampler's `length(epoch)`; None if it has none: it may have another attribute `length`."""
    method = getattr(sampler, "length", None)
    if not callable(method) or "epoch" not in signature(method).parameters:
        return None
    return method  # type: ignore[no-any-return]


def _same_length(sampler: Any) -> int:
    if not hasattr(sampler, "__len__"):
        raise DataError(
            f"{type(sampler).__name__} doesn't say how many samples an epoch has. Give it __len__, or length(epoch) if "
            "epochs differ."
        )
    return len(sampler)


@final
@dataclass(frozen=True)
class EpochSteps:
    """The optimizer steps of each epoch."""

    # None: of a stream, whose length is unknown: it has as many steps as `limit` allows, or fewer.
    sizes: EpochSizes | None
    plan: BatchPlan
    # Batches of each process at most, or a share of them; a stream has a number.
    limit: int | float | None = None
    # Batches of a process in a step.
    accumulated: int = 1

    @property
    def constant(self) -> int | None:
        """Steps of every epoch; None if epochs differ."""
        if self.sizes is None:
            assert self.limit is not None, "a stream without a limit has no EpochSteps"
            return math.ceil(self.limit / self.accumulated)
        if self.sizes.constant is None:
            return None
        return self._of_size(self.sizes.constant)

    def of(self, epoch: int) -> int:
        """Return the steps of an epoch. Raises DataError for one that differs from others and has none."""
        constant = self.constant
        if constant is not None:
            return constant
        assert self.sizes is not None
        size = self.sizes.of(epoch)
        steps = self._of_size(size)
        if steps == 0:
            raise DataError(
                f"data.drop_last=true leaves nothing of epoch {epoch}: it has {size} samples, and a global batch takes "
                f"{self.plan.global_batch_size}.\nUse a smaller data.batch_size (or data.global_batch_size), or "
                "data.drop_last=false."
            )
        return steps

    def between(self, begin: int, end: int) -> int:
        """Return the steps of the epochs from `begin` to before `end`."""
        if self.constant is not None:
            return max(0, end - begin) * self.constant
        return sum(self.of(epoch) for epoch in range(begin, end))

    def done(self, nominal_samples: int) -> int:
        """Return the steps of an epoch that took so many samples, if each global batch had been complete."""
        return count_windows(nominal_samples, global_batch_size=self.plan.global_batch_size)

    def share(self, epoch: int, share: float) -> int:
        """Return the whole steps in a share of an epoch, at least one."""
        return max(1, int(self.of(epoch) * share))

    def samples_of(self, epoch: int) -> int:
        """Return the samples that an epoch takes."""
        most = self.of(epoch) * self.plan.global_batch_size
        if self.sizes is None:
            return most
        return min(most, self.sizes.of(epoch))

    def _of_size(self, size: int) -> int:
        steps = count_windows(size, global_batch_size=self.plan.global_batch_size, drop_last=self.plan.drop_last)
        batches = apply_limit(steps * self.accumulated, self.limit)
        return math.ceil(batches / self.accumulated)


def apply_limit(total: int, limit: int | float | None) -> int:
    """Return how many of `total` batches a limit leaves: an int is a number of them, a float a share."""
    if limit is None:
        return total
    if isinstance(limit, int):
        return min(total, limit)
    if limit == 0 or total == 0:
        return 0
    return max(1, int(total * limit))
