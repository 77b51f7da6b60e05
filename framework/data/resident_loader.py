"""Batches of samples that are rows of tensors: one operation gathers many windows, whose batches are views.

For small batches the operations that make one cost more than those that compute with it. Each batch is aligned like
newly allocated memory, so that kernels that depend on alignment make the same choice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import cycle
from math import gcd, lcm
from typing import final

import torch
from torch import Tensor

from framework.data.batching import BatchPlan, micro_batches
from framework.data.fetch import BatchRequest, batch_key
from framework.data.prefetch import prefetch, to_device
from framework.data.tensor_samples import TensorRows, row_bytes
from framework.types import Batch, MicroBatch, MicroIndices, Window

_MAX_BYTES = 1 << 20  # gathered at once
_MAX_WINDOWS = 64

NOT_TAKEN = "a window's micro-batches were not all taken"

_SMALL_ROW_BYTES = 1024
_ALIGNMENT_BYTES = 64  # of torch's memory on the CPU; an accelerator's is a multiple of it


@final
class ResidentRows:
    """Batches of `rows` on a device, which may be another than theirs; `seed` is for random transforms."""

    def __init__(self, rows: TensorRows, *, device: torch.device, seed: int) -> None:
        self.rows = rows
        self.seed = seed
        self._device = device
        self._is_there = rows.device == device

    def batches(self, requests: Iterable[BatchRequest]) -> Iterator[Batch]:
        """Yield the batches asked for, in order, by one operation for each tensor."""
        for _, tensors in self.tensors(requests):
            yield self.rows.pack(tensors)

    def tensors(self, requests: Iterable[BatchRequest]) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Yield for each request its indices, unmoved, and the rows, transformed and on the device."""
        if self._is_there:
            for indices, epoch in requests:
                there = to_device(indices, self._device)
                yield indices, self._transformed(self.rows.gather(there), there, epoch)
            return
        shown: deque[BatchRequest] = deque()  # what is being copied ahead

        def gathered() -> Iterator[Batch]:
            for request in requests:
                shown.append(request)
                yield request.indices, self.rows.gather(request.indices.to(self.rows.device))

        for there, tensors in prefetch(gathered(), self._device):
            indices, epoch = shown.popleft()
            yield indices, self._transformed(tensors, there, epoch)

    def _transformed(self, tensors: list[Tensor], there: Tensor, epoch: int) -> list[Tensor]:
        if self.rows.transform is None:
            return tensors
        return self.rows.transformed(tensors, there, key=batch_key(self.seed, epoch))


@final
class WindowGatherer:
    """Gathers the full windows of one rank, several at a time; `windows_at_once` is 0 if one is too large for that."""

    def __init__(self, source: ResidentRows, plan: BatchPlan, *, rank: int) -> None:
        self._source = source
        self._global_batch_size = plan.global_batch_size
        self._packs = source.rows.pack is not list  # the views already come as lists
        parts = micro_batches(plan, global_count=plan.global_batch_size, rank=rank)
        self._sizes = [len(part) for part in parts]
        multiple, bytes_per_row = _alignment(source)
        # Rows of one batch, and as many more as the next one needs to begin where memory is aligned.
        self._stride = -(-max(self._sizes) // multiple) * multiple
        self._columns = torch.tensor([[min(part[0] + i, part[-1]) for i in range(self._stride)] for part in parts])
        window_bytes = max(1, self._columns.numel() * bytes_per_row)
        # Large rows of an odd size are aligned so rarely that padding would cost more than it saves.
        is_dense = self._stride <= 2 * max(self._sizes) or bytes_per_row <= _SMALL_ROW_BYTES
        self.windows_at_once = min(_MAX_WINDOWS, _MAX_BYTES // window_bytes) if is_dense else 0

    def windows(self, order: Tensor, *, epoch: int, ends_epoch: bool) -> Iterator[Window]:
        """Yield the windows of `order`, the indices of whole global batches one after another.

        ends_epoch: Nothing of the epoch follows.
        """
        if not len(order):
            return
        size, number, left = self._global_batch_size, len(self._sizes), len(order) // self._global_batch_size
        requests = (BatchRequest(self._positions(chunk), epoch) for chunk in order.split(self.windows_at_once * size))
        for indices, tensors in self._source.tensors(requests):
            rows = map(list, zip(*map(self._views, tensors), strict=True))
            batches = map(self._source.rows.pack, rows) if self._packs else rows
            micro_batches = map(MicroBatch, batches, cycle(self._sizes))
            shown = map(MicroIndices, self._views(indices), cycle(self._sizes))
            # One after another from the same iterators: zip gives as many to each window.
            for of_window, micros in zip(
                zip(*[shown] * number, strict=True), zip(*[micro_batches] * number, strict=True), strict=True
            ):
                left -= 1
                taken = iter(micros)
                yield Window(taken, number, size, ends_epoch and left == 0, of_window)
                assert next(taken, None) is None, NOT_TAKEN

    def _positions(self, chunk: Tensor) -> Tensor:
        """Return the indices in `chunk` that this rank gets, each batch padded to the stride."""
        return chunk.view(-1, self._global_batch_size).index_select(1, self._columns.flatten()).flatten()

    def _views(self, tensor: Tensor) -> list[Tensor]:
        """Return the memory of each micro-batch, without the padding."""
        every = tensor.view(-1, self._stride, *tensor.shape[1:])
        if self._sizes[0] < self._stride:
            every = every[:, : self._sizes[0]]
        views = list(every.unbind())
        if self._sizes[-1] < self._sizes[0]:  # they differ by one at most, the larger ones first
            number = len(self._sizes)
            views = [view[: self._sizes[i % number]] for i, view in enumerate(views)]
        # Tensors of their own to autograd: a task may change its batch in place, and keep it for its graph.
        return [view.data for view in views]


def _alignment(source: ResidentRows) -> tuple[int, int]:
    """Return after how many rows memory is aligned in every tensor, and the bytes of a row, transformed or not.

    Found by loading one sample.
    """
    first = BatchRequest(torch.zeros(1, dtype=torch.int64), 0)
    _, made = next(source.tensors([first]))
    kept = [row_bytes(tensor) for tensor in source.rows.tensors]
    sizes = [row_bytes(tensor) for tensor in made]
    multiple = lcm(*(_ALIGNMENT_BYTES // gcd(_ALIGNMENT_BYTES, size) for size in (*kept, *sizes)))
    return multiple, max(sum(kept), sum(sizes))
