"""Global batches that are listed: those of a batch sampler, an iterable of lists of indices with a length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from framework.data.keyed_random import KeyedRandom
from framework.errors import DataError
from framework.types import Order

# The first batches are listed with this seed to find out how large they are, which doesn't change the numbers.
_SEED_OF_SIZES = 0


class BatchLists:
    """The sampler of a train part whose global batches have sizes of their own.

    Steps, schedules and limits count as if each batch had `nominal_size` samples.
    """

    # Where the batches come from, for messages.
    name: str
    nominal_size: int

    def __len__(self) -> int:
        return self.num_batches * self.nominal_size

    @property
    def num_batches(self) -> int:
        """Batches of each epoch."""
        raise NotImplementedError

    def batches(self) -> list[Sequence[Tensor]]:
        """Return the indices of each batch of an epoch, in groups. Each group is split over the processes by itself."""
        raise NotImplementedError

    def split_over(self, processes: int) -> None:
        """Note the number of processes. Raises DataError if it doesn't suit the batches."""

    def order(self, generator: torch.Generator, *, batch_size: int) -> Order:
        """Return the indices of all batches, one after another."""
        return ListedOrder.of(self.batches()).indices


@final
class UserBatches(BatchLists):
    """The batches of a batch sampler. Their nominal size is that of the largest one of the first epoch.

    Raises DataError for batches that aren't the same when they are listed again.
    """

    def __init__(self, batch_sampler: Any) -> None:
        self._batch_sampler = batch_sampler
        self.name = f"batch_sampler={type(batch_sampler).__name__}"
        random = KeyedRandom(batch_sampler)
        with random.preserved():
            random.seed(_SEED_OF_SIZES)
            first = self.batches()
            random.seed(_SEED_OF_SIZES)
            second = self.batches()
        pairs = zip(first, second, strict=True)
        if not all(torch.equal(indices, again) for (indices,), (again,) in pairs):
            raise DataError(
                f"{self.name} gives other batches when it is iterated again with the same random numbers, so a run "
                "couldn't resume, and processes would differ.\nLet its batches depend only on set_epoch(epoch) and on "
                "generators of Python, NumPy or torch, which may be global or its own."
            )
        self.nominal_size = max(len(indices) for (indices,) in first)

    @property
    def num_batches(self) -> int:
        return len(self._batch_sampler)

    def batches(self) -> list[Sequence[Tensor]]:
        """Return the indices of each batch. Raises DataError for anything but lists of indices."""
        batches: list[Sequence[Tensor]] = [(self._indices(batch),) for batch in self._batch_sampler]
        if len(batches) != self.num_batches:
            raise DataError(
                f"{self.name} gave {len(batches)} batches, and its length is {self.num_batches}. Let __len__ return "
                "the number of batches of each epoch."
            )
        if not batches:
            raise DataError(f"{self.name} gave no batch.")
        return batches

    def _indices(self, batch: Any) -> Tensor:
        try:
            indices = torch.as_tensor(batch)
        except (RuntimeError, TypeError, ValueError):
            indices = torch.empty(0)
        if indices.dtype != torch.int64 or indices.ndim != 1 or len(indices) == 0:
            raise DataError(f"{self.name} gave {batch!r} as a batch. It must give lists of indices, none empty.")
        return indices


class ListedOrder(NamedTuple):
    """The order of an epoch whose global batches have sizes of their own."""

    # Of the dataset, int64.
    indices: Tensor
    # The position in the order at which each batch begins, and at the end the length of the order.
    begins: Sequence[int]
    # The sizes of the groups of each batch.
    groups: Sequence[Sequence[int]]

    @staticmethod
    def of(batches: Sequence[Sequence[Tensor]]) -> ListedOrder:
        begins = [0]
        indices: list[Tensor] = []
        groups = []
        for batch in batches:
            sizes = [len(group) for group in batch]
            begins.append(begins[-1] + sum(sizes))
            groups.append(sizes)
            indices += batch
        return ListedOrder(torch.cat(indices), begins, groups)

    def number_at(self, position: int) -> int:
        """Return the number of the batch that begins at a position. Raises DataError if none does."""
        if position not in self.begins:
            raise DataError(
                f"Training can't continue at sample {position} of the epoch: no batch begins there. The batches aren't "
                "those of the checkpoint: set them back, or resume from an epoch's end."
            )
        return self.begins.index(position)
