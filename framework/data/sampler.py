"""One global order of the samples per epoch, and this rank's part of every global batch of it.

The order depends on the seed and the epoch alone, never on ranks: runs with the same global batch size see the same
batches on any number of processes, and a run may resume in the middle of an epoch with another number of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from framework.data.batching import BatchPlan, count_windows, micro_batches, share
from framework.distributed.seed import mix
from framework.errors import DataError
from framework.types import MicroIndices


class WindowIndices(NamedTuple):
    """One rank's part of one global batch, as indices of the dataset; see `framework.types.Window`."""

    micro_batches: tuple[MicroIndices, ...]
    global_count: int
    epoch_end: bool


@dataclass(frozen=True)
class GlobalOrder:
    """The order in which `size` samples are consumed: shuffled again every epoch, or as they are."""

    size: int
    seed: int
    shuffle: bool

    def indices(self, epoch: int) -> Tensor:
        """Return the dataset's indices in the order of this epoch: shape (size,), int64, on the CPU."""
        if not self.shuffle:
            return torch.arange(self.size)
        generator = torch.Generator().manual_seed(mix(self.seed, "order", epoch))
        return torch.randperm(self.size, generator=generator)


def epoch_length(order: GlobalOrder, plan: BatchPlan, *, limit: int | None) -> int:
    """Return the samples an epoch consumes over all ranks; `limit`: the largest number of global batches."""
    return order.size if limit is None else min(order.size, limit * plan.global_batch_size)


def epoch_indices(
    order: GlobalOrder, plan: BatchPlan, *, epoch: int, start: int = 0, limit: int | None = None
) -> Tensor:
    """Return the indices that `epoch` consumes from its sample `start` on: int64, on the CPU.

    Raises DataError if `start` isn't inside the epoch.
    """
    end = epoch_length(order, plan, limit=limit)
    if not 0 <= start < end:
        raise DataError(
            f"Training can't continue at sample {start} of an epoch of {end} samples.\n"
            "The dataset or trainer.limit_train_batches is smaller than when the checkpoint was made: set them back."
        )
    return order.indices(epoch)[start:end]


def windows(indices: Tensor, plan: BatchPlan, *, rank: int) -> Iterator[WindowIndices]:
    """Yield this rank's part of each global batch of what an epoch consumes; the last, short one is kept."""
    full = micro_batches(plan, global_count=plan.global_batch_size, rank=rank)
    end = len(indices)
    for begin in range(0, end, plan.global_batch_size):
        count = min(plan.global_batch_size, end - begin)
        parts = full if count == plan.global_batch_size else micro_batches(plan, global_count=count, rank=rank)
        yield WindowIndices(_take(indices, parts, begin=begin), count, begin + count == end)


def windows_per_epoch(order: GlobalOrder, plan: BatchPlan, *, limit: int | None = None) -> int:
    """Return the optimizer steps of a whole epoch."""
    return count_windows(epoch_length(order, plan, limit=limit), global_batch_size=plan.global_batch_size)


def evaluation_indices(size: int, *, rank: int, world_size: int) -> Tensor:
    """Return the indices that `rank` evaluates: over all ranks every one of `size` exactly once, without padding."""
    mine = share(size, rank=rank, world_size=world_size)
    return torch.arange(mine.start, mine.stop)


def _take(indices: Tensor, parts: list[range], *, begin: int) -> tuple[MicroIndices, ...]:
    """Return the indices of each part of the global batch that begins at `begin`."""
    # Any sample of it will do as a stand-in: its loss is multiplied by 0.
    return tuple(
        MicroIndices(indices[begin + part.start : begin + part.stop], len(part))
        if part
        else MicroIndices(indices[begin : begin + 1], 0)
        for part in parts
    )
