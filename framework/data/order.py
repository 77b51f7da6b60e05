"""One global order of the samples per epoch, and each rank's micro-batches of every global batch of it.

The order depends on the seed and the epoch alone, never on ranks: runs with the same global batch size see the same
batches on any number of processes, and a run may resume in the middle of an epoch with another number of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, final

import torch
from torch import Tensor

from framework.data.batch_lists import BatchLists, ListedOrder
from framework.data.batching import BatchPlan, count_windows, micro_batches, share
from framework.data.epochs import EpochSizes, takes_epoch
from framework.data.keyed_random import KeyedRandom
from framework.data.permutation import in_order, shuffled
from framework.distributed.seed import mix
from framework.errors import DataError
from framework.types import MicroIndices, Order, Sampler

_T = TypeVar("_T")

_READ_AT_ONCE = 1 << 16
"""Samples: one slice of an order that is computed costs about 0.1 ms, however short it is."""


@final
class GlobalOrder:
    """The order in which `num_samples` are consumed: of a sampler, shuffled again every epoch, or as they are."""

    def __init__(self, num_samples: int, seed: int, shuffle: bool, sampler: Sampler | None = None) -> None:
        self.sizes = EpochSizes(num_samples, sampler)
        self._num_samples = num_samples
        self._seed = seed
        self._shuffle = shuffle
        self._sampler = sampler

    def indices(self, epoch: int, *, batch_size: int = 1) -> Order:
        """Return the dataset's indices in the order of this epoch: int64, on the CPU.

        batch_size: samples of a global batch. Raises DataError for a sampler that returns anything else; if its order
        is computed slice by slice, so is the check.
        """
        generator = torch.Generator().manual_seed(mix(self._seed, "order", epoch))
        if self._sampler is not None:
            return self._of_sampler(self._sampler, epoch, generator, batch_size=batch_size)
        if self._shuffle:
            return shuffled(self._num_samples, generator)
        return in_order(self._num_samples)

    def _of_sampler(self, sampler: Sampler, epoch: int, generator: torch.Generator, *, batch_size: int) -> Order:
        keywords = {"batch_size": batch_size}
        if takes_epoch(sampler.order):
            keywords["epoch"] = epoch
        order: Any = self._seeded(sampler, epoch, lambda: sampler.order(generator, **keywords))
        check = _IndexCheck(type(sampler).__name__, size=self.sizes.of(epoch), num_samples=self._num_samples)
        if isinstance(order, Tensor):
            check.whole(order)
            return order
        return _CheckedOrder(order, check)

    def listed(self, lists: BatchLists, epoch: int) -> ListedOrder:
        """Return the batches of this epoch. Raises DataError for indices that aren't those of samples."""
        order = ListedOrder.of(self._seeded(lists, epoch, lists.batches))
        check = _IndexCheck(lists.name, size=len(order.indices), num_samples=self._num_samples)
        check.whole(order.indices)
        return order

    def _seeded(self, sampler: Any, epoch: int, draw: Callable[[], _T]) -> _T:
        """Return what a sampler draws. It may use any generator, and every rank must get the same order."""
        random = KeyedRandom(sampler)
        with random.preserved():
            random.seed(mix(self._seed, "sampler", epoch))
            return draw()


class _IndexCheck(NamedTuple):
    """Raises DataError for indices that a sampler mustn't return."""

    # The class of the sampler.
    kind: str
    # Samples of the epoch, and of the dataset.
    size: int
    num_samples: int

    def whole(self, order: Tensor) -> None:
        if order.shape != (self.size,) or order.dtype != torch.int64:
            raise DataError(
                f"{self.kind}.order returned a tensor of shape {tuple(order.shape)}, {order.dtype}. It must return "
                f"int64 indices of shape ({self.size},)."
            )
        self._range(order)

    def object(self, order: Any) -> None:
        """Check what is no tensor: it must have a length, and a slice of it must be one."""
        first = None
        if hasattr(order, "__len__") and hasattr(order, "__getitem__"):
            first = order[0:1]
        if not isinstance(first, Tensor):
            raise DataError(
                f"{self.kind}.order returned {order!r}. It must return int64 indices of shape ({self.size},), or an "
                "object with a length whose slices are such indices."
            )
        if len(order) != self.size:
            raise DataError(f"{self.kind}.order returned {len(order)} indices for an epoch of {self.size} samples.")

    def part(self, indices: Any, *, begin: int, end: int) -> None:
        is_right = isinstance(indices, Tensor) and indices.dtype == torch.int64 and indices.shape == (end - begin,)
        if not is_right:
            described = type(indices).__name__
            if isinstance(indices, Tensor):
                described = f"a tensor of shape {tuple(indices.shape)}, {indices.dtype}"
            raise DataError(
                f"The order that {self.kind}.order returned has {described} at [{begin}:{end}]. A slice of it must be "
                f"int64 indices of shape ({end - begin},)."
            )
        self._range(indices)

    def _range(self, indices: Tensor) -> None:
        if int(indices.min()) < 0 or int(indices.max()) >= self.num_samples:
            raise DataError(f"{self.kind}.order returned indices outside of the {self.num_samples} samples.")


@final
class _CheckedOrder:
    """The order of a sampler that computes it slice by slice. Checks each slice that is read."""

    def __init__(self, order: Order, check: _IndexCheck) -> None:
        check.object(order)
        self._order = order
        self._check = check

    def __len__(self) -> int:
        return self._check.size

    def __getitem__(self, positions: slice) -> Tensor:
        indices = self._order[positions]
        self._check.part(indices, begin=positions.start, end=positions.stop)
        return indices


def epoch_indices(
    order: GlobalOrder, plan: BatchPlan, *, epoch: int, start: int = 0, limit: int | None = None
) -> Tensor:
    """Return the indices that `epoch` consumes from its sample `start` on: int64, on the CPU. See `epoch_positions`."""
    positions = epoch_positions(order.sizes.of(epoch), plan, start=start, limit=limit)
    return order.indices(epoch, batch_size=plan.global_batch_size)[positions]


def epoch_positions(size: int, plan: BatchPlan, *, start: int, limit: int | None, may_be_over: bool = False) -> slice:
    """Return the slice of its order that an epoch of `size` samples consumes from its sample `start` on.

    limit: global batches of the epoch at most. may_be_over: return an empty slice if all was consumed. Raises DataError
    if `start` isn't inside the epoch.
    """
    end = size
    if limit is not None:
        end = min(end, limit * plan.global_batch_size)
    if may_be_over and end - start < (plan.global_batch_size if plan.drop_last else 1):
        return slice(start, start)
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
    # The positions of each micro-batch's samples in the epoch's order.
    positions: tuple[Sequence[int], ...]
    global_count: int
    epoch_end: bool
    # Samples that each rank has; None: `framework.data.batching.share` splits them.
    sizes: Sequence[int] | None = None


def windows(
    order: Order, plan: BatchPlan, *, rank: int, start: int = 0, end: int | None = None
) -> Iterator[WindowIndices]:
    """Yield this rank's part of each global batch at the positions [start, end) of an order.

    end: None: that of the order. The last, short batch is kept.
    """
    if end is None:
        end = len(order)
    full = micro_batches(plan, global_count=plan.global_batch_size, rank=rank)
    for position, batch in _global_batches(order, plan.global_batch_size, start=start, end=end):
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
            positions.append(range(position + loaded.start, position + loaded.stop))
        yield WindowIndices(tuple(micro), tuple(positions), count, epoch_end=position + count == end)


def listed_windows(
    order: ListedOrder, plan: BatchPlan, *, rank: int, accumulated: int, numbers: range
) -> Iterator[WindowIndices]:
    """Yield this rank's part of the batches of these numbers, `accumulated` of them in each step.

    Each group of a batch is split over the ranks, and a rank's part of it into as many pieces as a pipeline makes.
    """
    pieces = plan.micro_batches // accumulated
    for first in range(numbers.start, numbers.stop, accumulated):
        numbers_of_step = range(first, min(numbers.stop, first + accumulated))
        sizes = [0] * plan.world_size
        micro = []
        positions = []
        for number in numbers_of_step:
            for size in order.groups[number]:
                for other in range(plan.world_size):
                    sizes[other] += len(share(size, rank=other, world_size=plan.world_size))
            for piece in range(pieces):
                micro_positions = _positions_of_piece(
                    order, number, rank=rank, world_size=plan.world_size, piece=piece, pieces=pieces
                )
                num_samples = len(micro_positions)
                # Any sample will do as a stand-in.
                loaded = micro_positions or [order.begins[number]]
                micro.append(MicroIndices(order.indices[torch.tensor(loaded)], num_samples))
                positions.append(loaded)
        is_last = numbers_of_step.stop == numbers.stop
        yield WindowIndices(tuple(micro), tuple(positions), sum(sizes), is_last, sizes)


def _positions_of_piece(
    order: ListedOrder, number: int, *, rank: int, world_size: int, piece: int, pieces: int
) -> list[int]:
    """Return the positions of a rank's samples of a batch, or of a piece of them, group by group."""
    positions: list[int] = []
    begin = order.begins[number]
    for size in order.groups[number]:
        of_rank = share(size, rank=rank, world_size=world_size)
        places = share(len(of_rank), rank=piece, world_size=pieces)
        of_piece = of_rank[places.start : places.stop]
        positions += range(begin + of_piece.start, begin + of_piece.stop)
        begin += size
    return positions


def _global_batches(order: Order, batch_size: int, *, start: int, end: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the position and the indices of each global batch."""
    read_at_once = batch_size * max(1, _READ_AT_ONCE // batch_size)
    for begin in range(start, end, read_at_once):
        batches = order[begin : min(end, begin + read_at_once)].split(batch_size)
        for number, batch in enumerate(batches):
            yield begin + number * batch_size, batch
