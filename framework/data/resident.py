"""Data kept in memory as tensors: a batch is one indexing operation per tensor. `decode` makes tensors of other data.

For small batches the operations that make one cost more than those that compute with it, so one operation gathers many
windows, whose batches are views. Each is aligned like newly allocated memory, so that kernels that depend on alignment
make the same choice.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from functools import partial
from itertools import cycle, tee
from math import gcd
from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from framework.data.batch_dataset import BatchRequest, batch_draws
from framework.data.batching import BatchPlan, micro_batches
from framework.data.fetch import collate, load_sample
from framework.data.keyed_random import KeyedRandom
from framework.data.prefetch import prefetch, to_device
from framework.data.sample_check import CheckedSamples, check_rows
from framework.data.set_epoch import EpochListeners
from framework.data.tensor_samples import TensorSamples, row_bytes
from framework.distributed.seed import fingerprint
from framework.errors import DataError
from framework.system.formatting import format_bytes
from framework.types import Batch, MapDataset, MicroBatch, MicroIndices, Order, Window

_MAX_BYTES = 1 << 20
"""Gathered at once."""
_MAX_WINDOWS = 64
"""Gathered at once."""
_MAX_PADDING_BYTES = 1 << 14
"""Of a batch: copying more costs more than an operation."""
_ALIGNMENT_BYTES = 64
"""Of torch's memory on the CPU; an accelerator's is a multiple of it."""


class _Rows(NamedTuple):
    """Rows to gather."""

    # Samples of the dataset, int64.
    indices: Tensor
    # Their positions in the order of the epoch.
    positions: Tensor
    epoch: int


@final
class ResidentBatches:
    """Batches of `samples` on a device, which may be another than theirs; `seed` is for random transforms.

    listeners: call `set_epoch` of the samples' dataset and its transform.
    """

    def __init__(self, samples: TensorSamples, *, device: torch.device, seed: int, listeners: EpochListeners) -> None:
        self.samples = samples
        self._device = device
        self._seed = seed
        self._listeners = listeners

    def set_epoch(self, epoch: int) -> None:
        """Call `set_epoch` of the dataset and its transform, if the epoch is a new one. Raises RunError if it fails."""
        self._listeners.set_epoch(epoch)

    def check(self, indices: list[int]) -> CheckedSamples:
        """Transform samples twice with the same draws; those of `decode` have no transform."""
        return check_rows(self.samples, indices, seed=self._seed, device=self._device)

    def batches(self, requests: Iterable[BatchRequest]) -> Iterator[Batch]:
        """Yield the batches asked for, in order."""
        for _, tensors in self._gathered(map(_rows_of, requests)):
            yield self.samples.pack(tensors)

    def windows(
        self, order: Order, positions: slice, plan: BatchPlan, *, rank: int, epoch: int
    ) -> Generator[Window, None, int]:
        """Yield this rank's windows of the whole global batches in `order`; return how many samples these are.

        Gathers several windows at a time; none, and returns 0, if one is too large for that.

        Args:
            order: That of the whole epoch.
            positions: Of the samples that are left of it.
        """
        global_size = plan.global_batch_size
        num_left: int = positions.stop - positions.start
        num_windows = num_left // global_size
        micro_ranges = micro_batches(plan, global_count=global_size, rank=rank)
        sizes = [len(micro_range) for micro_range in micro_ranges]

        # Rows of one batch, and as many more as the next one needs to begin where memory is aligned.
        multiple, row_size_bytes = self._alignment()
        stride = -(-sizes[0] // multiple) * multiple
        padding_bytes = (stride - sizes[0]) * row_size_bytes
        window_bytes = stride * len(sizes) * row_size_bytes
        at_once = min(_MAX_WINDOWS, _MAX_BYTES // max(1, window_bytes))
        if num_windows == 0 or at_once == 0 or padding_bytes > _MAX_PADDING_BYTES:
            return 0

        # The places in a global batch of this rank's rows; the last one of a micro-batch is its padding.
        columns = []
        for micro_range in micro_ranges:
            columns += [min(micro_range[0] + i, micro_range[-1]) for i in range(stride)]
        column_index = torch.tensor(columns)
        num_samples = num_windows * global_size

        def requests() -> Iterator[_Rows]:
            end = positions.start + num_samples
            for begin in range(positions.start, end, at_once * global_size):
                chunk = order[begin : min(end, begin + at_once * global_size)].view(-1, global_size)
                begins = begin + global_size * torch.arange(len(chunk))
                chunk_positions = begins.unsqueeze(1) + column_index
                yield _Rows(chunk.index_select(1, column_index).flatten(), chunk_positions.flatten(), epoch)

        is_all = num_samples == num_left
        windows_left = num_windows
        for indices, tensors in self._gathered(requests()):
            columns_of_batches = [_views(tensor, stride, sizes) for tensor in tensors]
            batches = map(self.samples.pack, zip(*columns_of_batches, strict=True))
            micro = map(MicroBatch, batches, cycle(sizes))
            micro_indices = map(MicroIndices, _views(indices, stride, sizes), cycle(sizes))
            # One after another from the same iterators: zip gives as many to each window.
            micro_of_windows = zip(*[micro] * len(sizes), strict=True)
            indices_of_windows = zip(*[micro_indices] * len(sizes), strict=True)
            for window_indices, window_micro in zip(indices_of_windows, micro_of_windows, strict=True):
                windows_left -= 1
                is_last = is_all and windows_left == 0
                yield Window(iter(window_micro), len(sizes), global_size, is_last, window_indices)
        return num_samples

    def close(self) -> None:
        """Nothing to close."""

    def _gathered(self, requests: Iterable[_Rows]) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Yield for each request its indices, on the CPU, and the rows, transformed and on the device."""
        # Gathering runs one request ahead of the rows that are yielded.
        requests, requests_ahead = tee(requests)
        indices = (to_device(rows.indices, self.samples.device) for rows in requests_ahead)
        gathered = map(self.samples.gather, indices)
        for rows, tensors in zip(requests, prefetch(gathered, self._device), strict=True):
            if self.samples.transform is not None:
                position_B = to_device(rows.positions, self._device)
                draws = batch_draws(position_B, seed=self._seed, epoch=rows.epoch)
                tensors = self.samples.transformed(tensors, draws)
            yield rows.indices, tensors

    def _alignment(self) -> tuple[int, int]:
        """Return after how many rows memory is aligned in every tensor, and the bytes of a row, transformed or not.

        Found by loading one sample.
        """
        first = torch.zeros(1, dtype=torch.int64)
        _, transformed = next(self._gathered([_Rows(first, first, epoch=0)]))
        stored_bytes = [row_bytes(tensor) for tensor in self.samples.tensors]
        transformed_bytes = [row_bytes(tensor) for tensor in transformed]
        multiple = max(_ALIGNMENT_BYTES // gcd(_ALIGNMENT_BYTES, size) for size in stored_bytes + transformed_bytes)
        return multiple, max(sum(stored_bytes), sum(transformed_bytes))


def _rows_of(request: BatchRequest) -> _Rows:
    return _Rows(request.indices, torch.tensor(request.positions), request.epoch)


def _views(tensor: Tensor, stride: int, sizes: Sequence[int]) -> list[Tensor]:
    """Return the memory of each micro-batch, without the padding to `stride` rows. sizes: of those of a window."""
    views = tensor.view(-1, stride, *tensor.shape[1:])[:, : sizes[0]].unbind()
    # Tensors of their own to autograd: a task may change its batch in place, and keep it for its graph.
    if sizes[-1] == sizes[0]:
        return [view.data for view in views]
    # The sizes differ by one at most.
    return [view[:size].data for view, size in zip(views, cycle(sizes), strict=False)]


# Other data as tensors


def decode(dataset: MapDataset, *, split: str, limit_bytes: int | None) -> TensorSamples:
    """Return all samples of a dataset as tensors, in its order; the generators are restored.

    limit_bytes: What they may take; None: anything. Raises DataError if they take more, or if a sample draws random
    numbers, holds anything but numbers, or differs from the others in shape; RunError if the dataset raises.
    """
    if EpochListeners(dataset, split=split, seed=0):
        raise _refused("it has set_epoch(epoch), so its samples may change from epoch to epoch", split=split)
    random = KeyedRandom(dataset)
    with random.preserved():
        before = fingerprint(())
        before_with_own = random.fingerprint()
        first, spec = _load_tensors(dataset, 0, split=split)
        size_bytes = len(dataset) * sum(row_bytes(leaf) for leaf in first)
        if limit_bytes is not None and size_bytes > limit_bytes:
            sizes = f"{format_bytes(size_bytes)} in each process, and {format_bytes(limit_bytes)} are available"
            raise _refused(f"decoded it takes {sizes}", split=split)

        tensors = [leaf.new_empty((len(dataset), *leaf.shape[1:])) for leaf in first]
        for index in range(len(dataset)):
            leaves, leaves_spec = _load_tensors(dataset, index, split=split)
            if leaves_spec != spec or _kinds(leaves) != _kinds(first):
                raise _refused(f"sample {index} differs from the first in shape or type", split=split)
            for tensor, leaf in zip(tensors, leaves, strict=True):
                tensor[index] = leaf[0]

        if fingerprint(()) != before:
            raise _refused("it draws random numbers", split=split)
        draws_from_own = random.fingerprint() != before_with_own

    # The first sample was loaded twice, to detect other sources of randomness.
    for tensor, leaf in zip(tensors, first, strict=True):
        if not torch.equal(tensor[:1].nan_to_num(), leaf.nan_to_num()):
            raise _refused("its first sample isn't the same whenever it is loaded", split=split)
    if draws_from_own:
        raise _refused("it draws random numbers from a generator of its own", split=split)

    samples = TensorSamples(*tensors)
    samples.pack = partial(tree_unflatten, treespec=spec)
    return samples


def _kinds(leaves: Sequence[Tensor]) -> list[tuple[torch.dtype, torch.Size]]:
    return [(leaf.dtype, leaf.shape) for leaf in leaves]


def _load_tensors(dataset: MapDataset, index: int, *, split: str) -> tuple[list[Tensor], TreeSpec]:
    """Return a sample as `default_collate` makes a batch of it, flattened."""
    sample = load_sample(dataset, index, split=split)
    leaves, spec = tree_flatten(collate([sample], name=f"Sample {index} of the {split} dataset"))
    if not leaves:
        raise _refused(f"sample {index} holds nothing, not only numbers", split=split)
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise _refused(f"sample {index} holds {type(leaf).__name__}, not only numbers", split=split)
    return [leaf.detach() for leaf in leaves], spec


def _refused(why: str, *, split: str) -> DataError:
    return DataError(
        f"The {split} dataset can't be resident: {why}.\ndata.loader=resident keeps samples as they come once. Use "
        "data.loader=dataloader, or give framework.TensorSamples and a transform of batches, such as those of "
        "framework.transforms."
    )
