"""The batches of one rank, on its device: `TrainLoader` for optimizer steps, `EvalLoader` for every sample once."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import tee
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import Subset

from framework.data.batching import BatchPlan
from framework.data.fetch import BatchRequest, Workers, fetch_for
from framework.data.loader_choice import LoaderOptions, choose_loader
from framework.data.prefetch import pins_memory, prefetch
from framework.data.resident_loader import NOT_TAKEN, ResidentRows, WindowGatherer
from framework.data.sampler import (
    GlobalOrder,
    epoch_indices,
    epoch_length,
    evaluation_indices,
    windows,
    windows_per_epoch,
)
from framework.errors import DataError
from framework.types import Batch, MapDataset, MicroBatch, MicroIndices, Window

IN_THIS_PROCESS = LoaderOptions(num_workers=0)
"""Without loader processes: tensors are kept in memory, other data is loaded sample by sample."""


@final
class BatchSource:
    """Batches of a dataset on the device: of tensors in memory, or loaded in this process or by workers."""

    def __init__(
        self, dataset: MapDataset, *, part: str, seed: int, device: torch.device, options: LoaderOptions
    ) -> None:
        self._device = device
        self._workers: Workers | None = None
        self.rows: ResidentRows | None = None
        choice = choose_loader(dataset, part=part, device=device, options=options)
        if choice.rows is not None:
            self.rows = ResidentRows(choice.rows, device=device, seed=seed)
            return
        self._fetch = fetch_for(dataset, part=part, seed=seed)
        if choice.num_workers > 0:
            self._workers = Workers(self._fetch, num_workers=choice.num_workers, pin_memory=pins_memory(device))

    def batches(self, requests: Iterable[BatchRequest]) -> Iterator[Batch]:
        """Yield the batches asked for, in order. Without workers each is loaded when it is taken, or one ahead."""
        if self.rows is not None:
            return self.rows.batches(requests)
        loaded = map(self._fetch, requests) if self._workers is None else self._workers.batches(requests)
        return prefetch(loaded, self._device)

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()


@final
class TrainLoader:
    """This rank's part of every global batch. All ranks make one with the same order, plan and limit.

    limit: global batches per epoch at most. Raises DataError if the dataset is empty or has fewer samples than there
    are processes.
    """

    def __init__(
        self,
        dataset: MapDataset,
        *,
        order: GlobalOrder,
        plan: BatchPlan,
        rank: int,
        device: torch.device,
        options: LoaderOptions = IN_THIS_PROCESS,
        limit: int | None = None,
    ) -> None:
        size = dataset_size(dataset, part="train")
        if size != order.size:
            raise ValueError(f"The order is of {order.size} samples, the dataset has {size}.")
        check_one_sample_each(size, plan)
        self._order, self._plan, self._rank, self._limit = order, plan, rank, limit
        taken = epoch_length(order, plan, limit=limit)
        if not order.shuffle and taken < size:  # the same in every epoch: others needn't be kept in memory
            dataset = Subset(dataset, range(taken))  # type: ignore[arg-type]
        self._source = BatchSource(dataset, part="train", seed=order.seed, device=device, options=options)
        rows = self._source.rows
        self._gatherer = None if rows is None else WindowGatherer(rows, plan, rank=rank)

    def __len__(self) -> int:
        """Return the number of windows of a whole epoch."""
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
        """Yield the windows of `epoch` from sample `start` of its order on; samples before it are not loaded.

        Take all micro-batches of a window before the next window, and end one epoch before another is begun.
        Raises DataError if `start` isn't inside the epoch, RunError if a sample can't be loaded.
        """
        indices = epoch_indices(self._order, self._plan, epoch=epoch, start=start, limit=self._limit)
        if self._gatherer is None or self._gatherer.windows_at_once == 0:
            yield from self._loaded(indices, epoch=epoch)
            return
        whole = len(indices) - len(indices) % self._plan.global_batch_size
        yield from self._gatherer.windows(indices[:whole], epoch=epoch, ends_epoch=whole == len(indices))
        yield from self._loaded(indices[whole:], epoch=epoch)

    def state_dict(self) -> None:
        """Return nothing: the number of samples taken is all the state."""

    def load_state_dict(self, states: Sequence[Mapping[str, Any]], *, samples: int) -> None:
        """Nothing to load."""

    def _loaded(self, indices: Tensor, *, epoch: int) -> Iterator[Window]:
        """Yield windows whose batches are loaded one by one."""
        # Requests run ahead of the window that is yielded.
        shown, asked = tee(windows(indices, self._plan, rank=self._rank))
        requests = (BatchRequest(micro.indices, epoch) for window in asked for micro in window.micro_batches)
        batches = self._source.batches(requests)
        for window in shown:
            # Loads nothing before it is asked to.
            micro_batches = (MicroBatch(next(batches), micro.num_samples) for micro in window.micro_batches)
            number = len(window.micro_batches)
            yield Window(micro_batches, number, window.global_count, window.epoch_end, window.micro_batches)
            assert next(micro_batches, None) is None, NOT_TAKEN

    def replanned(self, plan: BatchPlan, *, limit: int | None = None) -> TrainLoader:
        """Return a loader of the same data with another plan and limit. For a loader without a limit of its own.

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

    Ranks may have different numbers of batches, or none; if `is_even`, those with fewer get stand-ins of no samples.
    Random transforms draw the same in every evaluation. part: `val` or `test`, for messages. Raises DataError if the
    dataset is empty.
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
        options: LoaderOptions = IN_THIS_PROCESS,
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
        self._source = BatchSource(dataset, part=part, seed=0, device=device, options=options)

    def __len__(self) -> int:
        """Return the number of batches of this rank, with stand-ins."""
        return len(self._batches)

    def __iter__(self) -> Iterator[MicroBatch]:
        return self.first(len(self._batches))

    def first(self, number: int) -> Iterator[MicroBatch]:
        """Return this rank's first `number` batches, or all if it has fewer."""
        batches = self._batches[:number]
        requests = (BatchRequest(micro.indices, epoch=0) for micro in batches)
        for micro, batch in zip(batches, self._source.batches(requests), strict=True):
            yield MicroBatch(batch, micro.num_samples)

    def close(self) -> None:
        """End the loader's worker processes; may be called again."""
        self._source.close()


def dataset_size(dataset: MapDataset, *, part: str) -> int:
    """Return the number of samples. Raises DataError if there are none."""
    size = len(dataset)
    if size == 0:
        raise DataError(f"The {part} dataset is empty. Look at the keywords of data.datasets.")
    return size


def check_one_sample_each(size: int, plan: BatchPlan) -> None:
    """Raise DataError if a train dataset of `size` samples leaves processes without any."""
    if size < plan.world_size:
        raise DataError(
            f"The train dataset has {size} samples for {plan.world_size} processes: some would never get one.\n"
            f"Use at most {size} processes (topology.procs_per_node), or more data."
        )
