"""Data kept in memory as tensors: a batch is one indexing operation per tensor. `decode` makes tensors of other data.

For small batches the operations that make one cost more than those that compute with it, so one operation gathers many
windows, whose batches are views. Each is aligned like newly allocated memory, so that kernels that depend on alignment
make the same choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import tee
from math import gcd
from typing import final

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from framework.data.batching import BatchPlan, micro_batches
from framework.data.fetch import BatchRequest, batch_draws, collate, load_sample
from framework.data.prefetch import prefetch, to_device
from framework.data.tensor_samples import TensorRows, row_bytes
from framework.distributed.seed import fingerprint, preserved_generators
from framework.errors import DataError
from framework.system.formatting import format_bytes
from framework.types import Batch, MapDataset, MicroBatch, MicroIndices, Window

_MAX_BYTES = 1 << 20  # gathered at once
_MAX_WINDOWS = 64
_MAX_PADDING_BYTES = 1 << 14  # of a batch: copying more costs more than an operation
_ALIGNMENT_BYTES = 64  # of torch's memory on the CPU; an accelerator's is a multiple of it
_BLOCK = 256  # samples decoded between two comparisons of the generators
_READ_TWICE = 8


@final
class ResidentBatches:
    """Batches of `rows` on a device, which may be another than theirs; `seed` is for random transforms."""

    def __init__(self, rows: TensorRows, *, device: torch.device, seed: int) -> None:
        self.rows = rows
        self._device = device
        self._seed = seed

    def batches(self, requests: Iterable[BatchRequest]) -> Iterator[Batch]:
        """Yield the batches asked for, in order."""
        for _, tensors in self.tensors(requests):
            yield self.rows.pack(tensors)

    def tensors(self, requests: Iterable[BatchRequest]) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Yield for each request its indices, on the CPU, and the rows, transformed and on the device."""
        given, asked = tee(requests)
        there = (to_device(request.indices, self.rows.device) for request in asked)
        gathered = ((index_B, self.rows.gather(index_B)) for index_B in there)
        for request, (index_B, tensors) in zip(given, prefetch(gathered, self._device), strict=True):
            draws = batch_draws(index_B, seed=self._seed, epoch=request.epoch)
            yield request.indices, self.rows.transformed(tensors, draws)

    def close(self) -> None:
        """Nothing to close."""


@final
class WindowGatherer:
    """Gathers the full windows of one rank, several at a time; `windows_at_once` is 0 if one is too large for that."""

    def __init__(self, source: ResidentBatches, plan: BatchPlan, *, rank: int) -> None:
        self._source = source
        self._global_batch_size = plan.global_batch_size
        ranges = micro_batches(plan, global_count=plan.global_batch_size, rank=rank)
        self._sizes = [len(each) for each in ranges]
        multiple, row_size_bytes = _alignment(source)
        # Rows of one batch, and as many more as the next one needs to begin where memory is aligned.
        self._stride = -(-self._sizes[0] // multiple) * multiple
        self._columns = torch.tensor([min(each[0] + i, each[-1]) for each in ranges for i in range(self._stride)])
        fits = (self._stride - self._sizes[0]) * row_size_bytes <= _MAX_PADDING_BYTES
        window_bytes = max(1, len(self._columns) * row_size_bytes)
        self.windows_at_once = min(_MAX_WINDOWS, _MAX_BYTES // window_bytes) if fits else 0

    def windows(self, order: Tensor, *, epoch: int, ends_epoch: bool) -> Iterator[Window]:
        """Yield the windows of `order`, the indices of whole global batches one after another.

        ends_epoch: Nothing of the epoch follows.
        """
        size, number, left = self._global_batch_size, len(self._sizes), len(order) // self._global_batch_size
        chunks = order.view(-1, size).index_select(1, self._columns).split(self.windows_at_once) if left else ()
        requests = (BatchRequest(chunk.flatten(), epoch) for chunk in chunks)
        for indices, tensors in self._source.tensors(requests):
            batches = map(self._source.rows.pack, map(list, zip(*map(self._views, tensors), strict=True)))
            sizes = self._sizes * (len(indices) // len(self._columns))
            micro = list(map(MicroBatch, batches, sizes))
            shown = list(map(MicroIndices, self._views(indices), sizes))
            for begin in range(0, len(sizes), number):
                left -= 1
                end = begin + number
                yield Window(iter(micro[begin:end]), number, size, ends_epoch and left == 0, tuple(shown[begin:end]))

    def _views(self, tensor: Tensor) -> list[Tensor]:
        """Return the memory of each micro-batch, without the padding."""
        views = tensor.view(-1, self._stride, *tensor.shape[1:])[:, : self._sizes[0]].unbind()
        # Tensors of their own to autograd: a task may change its batch in place, and keep it for its graph.
        if self._sizes[-1] == self._sizes[0]:
            return [view.data for view in views]
        number = len(self._sizes)  # they differ by one at most, the larger ones first
        return [view[: self._sizes[i % number]].data for i, view in enumerate(views)]


def _alignment(source: ResidentBatches) -> tuple[int, int]:
    """Return after how many rows memory is aligned in every tensor, and the bytes of a row, transformed or not.

    Found by loading one sample.
    """
    _, made = next(source.tensors([BatchRequest(torch.zeros(1, dtype=torch.int64), 0)]))
    kept, transformed = ([row_bytes(tensor) for tensor in tensors] for tensors in (source.rows.tensors, made))
    multiple = max(_ALIGNMENT_BYTES // gcd(_ALIGNMENT_BYTES, size) for size in (*kept, *transformed))
    return multiple, max(sum(kept), sum(transformed))


# Other data as tensors


def decode(dataset: MapDataset, *, split: str, limit_bytes: int | None) -> TensorRows:
    """Return all samples of a dataset as tensors, in its order, each loaded once; the generators are restored.

    limit_bytes: What they may take; None: anything. Raises DataError if they take more, or if a sample draws random
    numbers, holds anything but numbers, or differs from the others in shape; RunError if the dataset raises.
    """
    tensors: list[Tensor] = []
    spec: TreeSpec | None = None
    with preserved_generators():
        for begin in range(0, len(dataset), _BLOCK):
            end = min(begin + _BLOCK, len(dataset))
            before = fingerprint(())
            leaves, found = _load_block(dataset, range(begin, end), split=split)
            if fingerprint(()) != before:
                raise _refused(f"one of samples {begin} to {end - 1} draws random numbers", split=split)
            if spec is None:
                spec = found
                size_bytes = len(dataset) * sum(map(row_bytes, leaves))
                if limit_bytes is not None and size_bytes > limit_bytes:
                    sizes = f"{format_bytes(size_bytes)} in each process, and {format_bytes(limit_bytes)} are available"
                    raise _refused(f"decoded it takes {sizes}", split=split)
                tensors = [leaf.new_empty((len(dataset), *leaf.shape[1:])) for leaf in leaves]
            shapes, wanted = ([(each.dtype, each.shape[1:]) for each in some] for some in (leaves, tensors))
            if found != spec or shapes != wanted:
                raise _refused(f"samples from {begin} on differ in shape or type from those before", split=split)
            for tensor, leaf in zip(tensors, leaves, strict=True):
                tensor[begin:end] = leaf
        # Some again, to find a generator of the dataset's own.
        again, _ = _load_block(dataset, range(min(_READ_TWICE, len(dataset))), split=split)
        for tensor, leaf in zip(tensors, again, strict=True):
            if not torch.equal(tensor[: len(leaf)].nan_to_num(), leaf.nan_to_num()):
                raise _refused("its first samples aren't the same whenever they are loaded", split=split)
    assert spec is not None  # an empty dataset was refused before
    return TensorRows(tuple(tensors), pack=partial(tree_unflatten, treespec=spec))


def _load_block(dataset: MapDataset, indices: range, *, split: str) -> tuple[list[Tensor], TreeSpec]:
    """Return some samples as `default_collate` makes a batch of them, flattened."""
    samples = [load_sample(dataset, index, split=split) for index in indices]
    name = f"Samples {indices.start} to {indices.stop - 1} of the {split} dataset"
    leaves, spec = tree_flatten(collate(samples, name=name))
    others = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor)]
    if others or not leaves:
        raise _refused(
            f"sample {indices.start} holds {others[0] if others else 'nothing'}, not only numbers", split=split
        )
    return [leaf.detach() for leaf in leaves], spec


def _refused(why: str, *, split: str) -> DataError:
    return DataError(
        f"The {split} dataset can't be resident: {why}.\ndata.loader=resident keeps samples as they come once. Use "
        "data.loader=dataloader, or give framework.TensorSamples and a transform of batches, such as those of "
        "framework.transforms."
    )
