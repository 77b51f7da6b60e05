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

from framework.data.batching import BatchPlan, micro_batches
from framework.data.epoch_listeners import EpochListeners
from framework.data.keyed_random import KeyedRandom
from framework.data.prefetch import prefetch, to_device
from framework.data.sample_check import CheckedSamples, check_rows
from framework.data.tensor_samples import TensorSamples, row_bytes
from framework.data.workers import BatchRequest, batch_draws, collate, load_sample, tell_epoch
from framework.distributed.seed import fingerprint
from framework.errors import DataError
from framework.system.formatting import format_bytes
from framework.types import Batch, MapDataset, MicroBatch, MicroIndices, Window

_MAX_BYTES = 1 << 20  # gathered at once
_MAX_WINDOWS = 64
_MAX_PADDING_BYTES = 1 << 14  # of a batch: copying more costs more than an operation
_ALIGNMENT_BYTES = 64  # of torch's memory on the CPU; an accelerator's is a multiple of it


class _Rows(NamedTuple):
    """Rows to gather: samples of the dataset, int64, and their positions in the order of the epoch."""

    indices: Tensor
    positions: Tensor
    epoch: int


def _positions(request: BatchRequest) -> Tensor:
    return torch.arange(request.position, request.position + len(request.indices))


@final
class ResidentBatches:
    """Batches of `samples` on a device, which may be another than theirs; `seed` is for random transforms.

    listeners: call `set_epoch` of the samples' dataset and its transform.
    """

    def __init__(
        self, samples: TensorSamples, *, device: torch.device, seed: int, split: str, listeners: EpochListeners
    ) -> None:
        self.samples = samples
        self._device = device
        self._seed = seed
        self._split = split
        self._listeners = listeners

    def set_epoch(self, epoch: int) -> None:
        """Call `set_epoch` of the dataset and its transform, if the epoch is a new one. Raises RunError if it fails."""
        tell_epoch(self._listeners, epoch, split=self._split)

    def check(self, indices: list[int]) -> CheckedSamples:
        """Transform samples twice with the same draws; those of `decode` have no transform."""
        return check_rows(self.samples, indices, seed=self._seed, device=self._device)

    def batches(self, requests: Iterable[BatchRequest]) -> Iterator[Batch]:
        """Yield the batches asked for, in order."""
        rows = (_Rows(request.indices, _positions(request), request.epoch) for request in requests)
        for _, tensors in self._tensors(rows):
            yield self.samples.pack(tensors)

    def windows(
        self, order: Tensor, plan: BatchPlan, *, rank: int, epoch: int, start: int
    ) -> Generator[Window, None, int]:
        """Yield this rank's windows of the whole global batches in `order`; return how many samples these are.

        Gathers several windows at a time; none, and returns 0, if one is too large for that.

        Args:
            order: The indices that are left of the epoch.
            start: The position of the first of them in the order of the epoch.
        """
        size, left = plan.global_batch_size, len(order) // plan.global_batch_size
        ranges = micro_batches(plan, global_count=size, rank=rank)
        sizes = [len(each) for each in ranges]
        multiple, row_size_bytes = self._alignment()
        # Rows of one batch, and as many more as the next one needs to begin where memory is aligned.
        stride = -(-sizes[0] // multiple) * multiple
        at_once = min(_MAX_WINDOWS, _MAX_BYTES // max(1, stride * len(ranges) * row_size_bytes))
        if left == 0 or at_once == 0 or (stride - sizes[0]) * row_size_bytes > _MAX_PADDING_BYTES:
            return 0
        columns = torch.tensor([min(each[0] + i, each[-1]) for each in ranges for i in range(stride)])
        whole = order[: left * size]
        is_all, number = len(whole) == len(order), len(sizes)
        chunks = whole.view(-1, size).index_select(1, columns).split(at_once)
        begins = start + size * torch.arange(left)
        positions = (begins.unsqueeze(1) + columns).split(at_once)
        rows = (_Rows(chunk.flatten(), own.flatten(), epoch) for chunk, own in zip(chunks, positions, strict=True))
        for indices, tensors in self._tensors(rows):
            batches = map(self.samples.pack, zip(*(_views(tensor, stride, sizes) for tensor in tensors), strict=True))
            micro = map(MicroBatch, batches, cycle(sizes))
            shown = map(MicroIndices, _views(indices, stride, sizes), cycle(sizes))
            # One after another from the same iterators: zip gives as many to each window.
            for of_window, taken in zip(
                zip(*[shown] * number, strict=True), zip(*[micro] * number, strict=True), strict=True
            ):
                left -= 1
                yield Window(iter(taken), number, size, is_all and left == 0, of_window)
        return len(whole)

    def close(self) -> None:
        """Nothing to close."""

    def _tensors(self, requests: Iterable[_Rows]) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Yield for each request its indices, on the CPU, and the rows, transformed and on the device."""
        given, asked = tee(requests)
        there = (to_device(rows.indices, self.samples.device) for rows in asked)
        gathered = (self.samples.gather(index_B) for index_B in there)
        for rows, tensors in zip(given, prefetch(gathered, self._device), strict=True):
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
        _, made = next(self._tensors([_Rows(first, first, epoch=0)]))
        kept, transformed = ([row_bytes(tensor) for tensor in tensors] for tensors in (self.samples.tensors, made))
        multiple = max(_ALIGNMENT_BYTES // gcd(_ALIGNMENT_BYTES, size) for size in (*kept, *transformed))
        return multiple, max(sum(kept), sum(transformed))


def _views(tensor: Tensor, stride: int, sizes: Sequence[int]) -> list[Tensor]:
    """Return the memory of each micro-batch, without the padding to `stride` rows. sizes: of those of a window."""
    views = tensor.view(-1, stride, *tensor.shape[1:])[:, : sizes[0]].unbind()
    # Tensors of their own to autograd: a task may change its batch in place, and keep it for its graph.
    if sizes[-1] == sizes[0]:
        return [view.data for view in views]
    return [view[:size].data for view, size in zip(views, cycle(sizes), strict=False)]  # they differ by one at most


# Other data as tensors


def decode(dataset: MapDataset, *, split: str, limit_bytes: int | None) -> TensorSamples:
    """Return all samples of a dataset as tensors, in its order; the generators are restored.

    limit_bytes: What they may take; None: anything. Raises DataError if they take more, or if a sample draws random
    numbers, holds anything but numbers, or differs from the others in shape; RunError if the dataset raises.
    """
    if EpochListeners(dataset, seed=0):
        raise _refused("it has set_epoch(epoch), so its samples may change from epoch to epoch", split=split)
    random = KeyedRandom(dataset)
    with random.preserved():
        before = fingerprint(())
        before_own = random.fingerprint()
        first, spec = _load_tensors(dataset, 0, split=split)
        size_bytes = len(dataset) * sum(map(row_bytes, first))
        if limit_bytes is not None and size_bytes > limit_bytes:
            sizes = f"{format_bytes(size_bytes)} in each process, and {format_bytes(limit_bytes)} are available"
            raise _refused(f"decoded it takes {sizes}", split=split)
        tensors = [leaf.new_empty((len(dataset), *leaf.shape[1:])) for leaf in first]
        for index in range(len(dataset)):
            leaves, found = _load_tensors(dataset, index, split=split)
            shapes, wanted = ([(each.dtype, each.shape) for each in some] for some in (leaves, first))
            if found != spec or shapes != wanted:
                raise _refused(f"sample {index} differs from the first in shape or type", split=split)
            for tensor, leaf in zip(tensors, leaves, strict=True):
                tensor[index] = leaf[0]
        if fingerprint(()) != before:
            raise _refused("it draws random numbers", split=split)
        draws_own = random.fingerprint() != before_own
    # The first sample was loaded twice, to detect other sources of randomness.
    if any(not torch.equal(own[:1].nan_to_num(), leaf.nan_to_num()) for own, leaf in zip(tensors, first, strict=True)):
        raise _refused("its first sample isn't the same whenever it is loaded", split=split)
    if draws_own:
        raise _refused("it draws random numbers from a generator of its own", split=split)
    samples = TensorSamples(*tensors)
    samples.pack = partial(tree_unflatten, treespec=spec)
    return samples


def _load_tensors(dataset: MapDataset, index: int, *, split: str) -> tuple[list[Tensor], TreeSpec]:
    """Return a sample as `default_collate` makes a batch of it, flattened."""
    sample = load_sample(dataset, index, split=split)
    leaves, spec = tree_flatten(collate([sample], name=f"Sample {index} of the {split} dataset"))
    others = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor)]
    if others or not leaves:
        raise _refused(f"sample {index} holds {others[0] if others else 'nothing'}, not only numbers", split=split)
    return [leaf.detach() for leaf in leaves], spec


def _refused(why: str, *, split: str) -> DataError:
    return DataError(
        f"The {split} dataset can't be resident: {why}.\ndata.loader=resident keeps samples as they come once. Use "
        "data.loader=dataloader, or give framework.TensorSamples and a transform of batches, such as those of "
        "framework.transforms."
    )
