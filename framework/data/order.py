"""One global order of the samples per epoch, and each rank's micro-batches of every global batch of it.

The order depends on the seed and the epoch alone, never on ranks: runs with the same global batch size see the same
batches on any number of processes, and a run may resume in the middle of an epoch with another number of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from framework.data.batching import BatchPlan, count_windows, micro_batches
from framework.data.keyed_random import KeyedRandom
from framework.distributed.seed import mix
from framework.errors import DataError
from framework.types import MicroIndices, Sampler


@dataclass(frozen=True)
class GlobalOrder:
    """The order in which `size` samples are consumed: of a sampler, shuffled again every epoch, or as they are.

    num_samples: of the dataset, which a sampler's indices must be of.
    """

    size: int
    seed: int
    shuffle: bool
    sampler: Sampler | None = None
    num_samples: int = 0

    def indices(self, epoch: int, *, batch_size: int = 1) -> Tensor:
        """Return the dataset's indices in the order of this epoch: shape (size,), int64, on the CPU.

        batch_size: samples of a global batch. Raises DataError for a sampler that returns anything else.
        """
        if self.sampler is None and not self.shuffle:
            return torch.arange(self.size)
        generator = torch.Generator().manual_seed(mix(self.seed, "order", epoch))
        if self.sampler is None:
            return torch.randperm(self.size, generator=generator)
        # A sampler may also draw from other generators, and every rank must get the same order.
        random = KeyedRandom(self.sampler)
        with random.preserved():
            random.seed(mix(self.seed, "sampler", epoch))
            order: Any = self.sampler.order(generator, batch_size=batch_size)

        kind = type(self.sampler).__name__
        if not isinstance(order, Tensor):
            raise DataError(f"{kind}.order returned {order!r}. It must return int64 indices of shape ({self.size},).")
        if order.shape != (self.size,) or order.dtype != torch.int64:
            raise DataError(
                f"{kind}.order returned a tensor of shape {tuple(order.shape)}, {order.dtype}. It must return int64 "
                f"indices of shape ({self.size},)."
            )
        if int(order.min()) < 0 or int(order.max()) >= self.num_samples:
            raise DataError(f"{kind}.order returned indices outside of the {self.num_samples} samples.")
        return order


def epoch_indices(
    order: GlobalOrder, plan: BatchPlan, *, epoch: int, start: int = 0, limit: int | None = None
) -> Tensor:
    """Return the indices that `epoch` consumes from its sample `start` on: int64, on the CPU. See `epoch_positions`."""
    positions = epoch_positions(order, plan, start=start, limit=limit)
    return order.indices(epoch, batch_size=plan.global_batch_size)[positions]


def epoch_positions(order: GlobalOrder, plan: BatchPlan, *, start: int, limit: int | None) -> slice:
    """Return the slice of its order that an epoch consumes from its sample `start` on.

    limit: global batches of the epoch at most. Raises DataError if `start` isn't inside the epoch.
    """
    end = order.size
    if limit is not None:
        end = min(end, limit * plan.global_batch_size)
    if not 0 <= start < end:
        raise DataError(
            f"Training can't continue at sample {start} of an epoch of {end} samples.\n"
            "The dataset or trainer.limit_train_batches is smaller than when the checkpoint was made: set them back."
        )
    if plan.drop_last:
        end -= end % plan.global_batch_size
        left = count_windows(max(0, end - start), global_batch_size=plan.global_batch_size, drop_last=True)
        if left == 0:
            raise DataError(
                f"Training can't continue at sample {start} of an epoch of {end} samples: fewer are left than a global "
                f"batch of {plan.global_batch_size}, and data.drop_last=true drops them.\n"
                "Resume with the global batch size of before, or with data.drop_last=false."
            )
        end = start + left * plan.global_batch_size
    return slice(start, end)


class WindowIndices(NamedTuple):
    """One rank's part of one global batch, as indices of the dataset; see `framework.types.Window`."""

    micro_batches: tuple[MicroIndices, ...]
    # The position of each micro-batch's first sample in the epoch's order.
    positions: tuple[int, ...]
    global_count: int
    epoch_end: bool


def windows(indices: Tensor, plan: BatchPlan, *, rank: int, start: int = 0) -> Iterator[WindowIndices]:
    """Yield this rank's part of each global batch of what an epoch consumes; the last, short one is kept.

    indices: those of the epoch from its position `start` on.
    """
    full = micro_batches(plan, global_count=plan.global_batch_size, rank=rank)
    for begin in range(0, len(indices), plan.global_batch_size):
        batch = indices[begin : begin + plan.global_batch_size]
        count = len(batch)
        ranges = full
        if count < plan.global_batch_size:
            ranges = micro_batches(plan, global_count=count, rank=rank)
        micro = []
        positions = []
        for micro_range in ranges:
            # Any sample of it will do as a stand-in: its loss is multiplied by 0.
            loaded = micro_range or range(1)
            micro.append(MicroIndices(batch[loaded.start : loaded.stop], len(micro_range)))
            positions.append(start + begin + loaded.start)
        yield WindowIndices(tuple(micro), tuple(positions), count, epoch_end=begin + count == len(indices))
