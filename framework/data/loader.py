"""The batches of one rank, on its device: `TrainLoader` for optimizer steps, `EvalLoader` for every sample once."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import tee
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Subset

from framework.data.batching import BatchPlan
from framework.data.choosing import Loading, choose
from framework.data.device import pins_memory
from framework.data.fetch import Request, fetch_for
from framework.data.gathering import NOT_TAKEN, RowSource, WindowGatherer
from framework.data.prefetch import on_device
from framework.data.sampler import (
    GlobalOrder,
    WindowIndices,
    epoch_indices,
    epoch_length,
    evaluation_indices,
    windows,
    windows_per_epoch,
)
from framework.data.workers import Workers
from framework.errors import DataError
from framework.types import Batch, MapDataset, MicroBatch, MicroIndices, Window

IN_THIS_PROCESS = Loading(num_workers=0)
"""Without loader processes: of tensors where the data are some, else sample by sample."""


@final
class BatchSource:
    """Batches of a dataset on the device: of tensors in memory, or loaded in this process or by workers."""

    def __init__(self, dataset: MapDataset, *, part: str, seed: int, device: torch.device, loading: Loading) -> None:
        self._device = device
        self._workers: Workers | None = None
        self.rows: RowSource | None = None
        choice = choose(dataset, part=part, device=device, loading=loading)
        if choice.rows is not None:
            self.rows = RowSource(choice.rows, device=device, seed=seed)
            return
        self._fetch = fetch_for(dataset, part=part, seed=seed)
        if choice.num_workers > 0:
            self._workers = Workers(self._fetch, num_workers=choice.num_workers, pin_memory=pins_memory(device))

    def batches(self, requests: Iterable[Request]) -> Iterator[Batch]:
        """The batches asked for, in order. Without workers each is loaded when it is taken, or one ahead of a copy."""
        if self.rows is not None:
            return self.rows.batches(requests)
        loaded = map(self._fetch, requests) if self._workers is None else self._workers.batches(requests)
        return on_device(loaded, self._device)

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()


@final
class TrainLoader:
    """This rank's part of every global batch. All ranks make one with the same order, plan and limit.

    limit: global batches per epoch at most. Raises DataError when the dataset is empty, isn't map-style, or has less
    than one sample per process.
    """

    def __init__(
        self,
        dataset: MapDataset,
        *,
        order: GlobalOrder,
        plan: BatchPlan,
        rank: int,
        device: torch.device,
        loading: Loading = IN_THIS_PROCESS,
        limit: int | None = None,
    ) -> None:
        size = dataset_size(dataset, part="train")
        if size != order.size:
            raise ValueError(f"The order is of {order.size} samples, the dataset has {size}.")
        check_everyone_gets_one(size, plan)
        self._order, self._plan, self._rank, self._limit = order, plan, rank, limit
        taken = epoch_length(order, plan, limit=limit)
        if not order.shuffle and taken < size:  # the same in every epoch: no others need be kept in memory
            dataset = Subset(dataset, range(taken))  # type: ignore[arg-type]
        self._source = BatchSource(dataset, part="train", seed=order.seed, device=device, loading=loading)
        rows = self._source.rows
        self._gatherer = None if rows is None else WindowGatherer(rows, plan, rank=rank)

    def __len__(self) -> int:
        """Windows of a whole epoch."""
        return windows_per_epoch(self._order, self._plan, limit=self._limit)

    @property
    def steps_per_epoch(self) -> int:
        return len(self)

    @property
    def size(self) -> int:
        """Samples of the whole dataset, regardless of `limit`."""
        return self._order.size

    @property
    def global_batch_size(self) -> int:
        return self._plan.global_batch_size

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Window]:
        """The windows of `epoch` from the sample cursor `start` on; samples before it are not loaded.

        Take all micro-batches of a window before the next window, and end one epoch before another is begun.
        Raises DataError when the cursor isn't inside the epoch, RunError when a sample can't be loaded.
        """
        indices = epoch_indices(self._order, self._plan, epoch=epoch, start=start, limit=self._limit)
        if self._gatherer is None or self._gatherer.windows_at_once == 0:
            yield from self._loaded(indices, epoch=epoch)
            return
        whole = len(indices) - len(indices) % self._plan.global_batch_size
        yield from self._gatherer.windows(indices[:whole], epoch=epoch, to_the_end=whole == len(indices))
        yield from self._loaded(indices[whole:], epoch=epoch)

    def state_dict(self) -> None:
        """Nothing: the sample cursor says it all."""

    def load_state_dict(self, states: Sequence[Mapping[str, Any]], *, samples: int) -> None:
        """Nothing either."""

    def _loaded(self, indices: Tensor, *, epoch: int) -> Iterator[Window]:
        """Windows whose batches are loaded one by one."""
        shown, asked = tee(windows(indices, self._plan, rank=self._rank))  # requests run ahead of the window shown
        batches = self._source.batches(_requests(asked, epoch=epoch))
        for window in shown:
            micro_batches = _take(batches, window)
            number = len(window.micro_batches)
            yield Window(micro_batches, number, window.global_count, window.epoch_end, window.micro_batches)
            assert next(micro_batches, None) is None, NOT_TAKEN

    def replanned(self, plan: BatchPlan, *, limit: int | None = None) -> TrainLoader:
        """The same samples, loaded by the same means, dealt by another plan. For a loader without a limit of its own.

        Use one of the two at a time; closing either closes both.
        """
        other = copy.copy(self)
        other._plan, other._limit = plan, limit
        rows = self._source.rows
        other._gatherer = None if rows is None else WindowGatherer(rows, plan, rank=self._rank)
        return other

    def close(self) -> None:
        """End the loader's worker processes; may be called again."""
        self._source.close()


@final
class EvalLoader:
    """This rank's share of a whole part: over all ranks every sample exactly once, in the dataset's order.

    Ranks may have different numbers of batches, or none; where `is_even`, those with fewer get stand-ins of no samples.
    Random transforms draw the same in every evaluation. part: `val` or `test`, for messages. Raises DataError when the
    dataset is empty or isn't map-style.
    """

    def __init__(
        self,
        dataset: MapDataset,
        *,
        part: str,
        batch_size: int,
        rank: int,
        world_size: int,
        device: torch.device,
        loading: Loading = IN_THIS_PROCESS,
        is_even: bool = False,
    ) -> None:
        size = dataset_size(dataset, part=part)
        indices = evaluation_indices(size, rank=rank, world_size=world_size)
        # Splitting nothing would give one empty piece.
        pieces = torch.split(indices, batch_size) if len(indices) else ()
        self._batches = [MicroIndices(piece, len(piece)) for piece in pieces]
        if is_even:
            most = -(-len(evaluation_indices(size, rank=0, world_size=world_size)) // batch_size)
            # Any sample of it will do: its results are left out.
            self._batches += [MicroIndices(torch.zeros(1, dtype=torch.int64), 0)] * (most - len(pieces))
        self._source = BatchSource(dataset, part=part, seed=0, device=device, loading=loading)

    def __len__(self) -> int:
        """Batches of this rank, stand-ins too."""
        return len(self._batches)

    def __iter__(self) -> Iterator[MicroBatch]:
        return self.first(len(self._batches))

    def first(self, number: int) -> Iterator[MicroBatch]:
        """Return this rank's first `number` batches, or all if it has fewer."""
        batches = self._batches[:number]
        requests = (Request(micro.indices, epoch=0) for micro in batches)
        for micro, batch in zip(batches, self._source.batches(requests), strict=True):
            yield MicroBatch(batch, micro.num_samples)

    def close(self) -> None:
        """End the loader's worker processes; may be called again."""
        self._source.close()


def dataset_size(dataset: MapDataset, *, part: str) -> int:
    """Samples of a dataset. Raises DataError when it is empty or isn't map-style."""
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise DataError(
            f"The {part} dataset, a {type(dataset).__name__}, isn't map-style.\n"
            "data.datasets must give datasets with __len__ and with __getitem__ for every index below the length."
        )
    size = len(dataset)
    if size == 0:
        raise DataError(f"The {part} dataset is empty. Look at the keywords of data.datasets.")
    return size


def check_everyone_gets_one(size: int, plan: BatchPlan) -> None:
    """Raise DataError where a train dataset of `size` samples leaves processes without any."""
    if size < plan.world_size:
        raise DataError(
            f"The train dataset has {size} samples for {plan.world_size} processes: some would never get one.\n"
            f"Use at most {size} processes (topology.procs_per_node), or more data."
        )


def _requests(dealt: Iterable[WindowIndices], *, epoch: int) -> Iterator[Request]:
    return (Request(micro.indices, epoch) for window in dealt for micro in window.micro_batches)


def _take(batches: Iterator[Batch], window: WindowIndices) -> Iterator[MicroBatch]:
    """The next batches of a stream, as this window's; loads nothing before it is asked to."""
    for micro in window.micro_batches:
        yield MicroBatch(next(batches), micro.num_samples)
