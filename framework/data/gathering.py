"""Batches of samples that are rows of tensors: many windows are gathered by one operation and dealt out as views.

For small batches the operations that make one cost more than those that compute with it. What a batch holds is the
same: each begins where fresh memory could, so that kernels that look at alignment choose alike.
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
from framework.data.device import to_device
from framework.data.fetch import Request, batch_key
from framework.data.prefetch import on_device
from framework.data.rows import Rows, row_bytes
from framework.types import Batch, MicroBatch, MicroIndices, Window

MOST_BYTES = 1 << 20
"""Of what is gathered at once."""
MOST_WINDOWS = 64

NOT_TAKEN = "a window's micro-batches were not all taken"

_SMALL_ROW_BYTES = 1024
_ALIGNMENT_BYTES = 64  # of torch's memory on the CPU; an accelerator's is a multiple of it


@final
class RowSource:
    """Batches of `rows` on a device, which is theirs or another's; random numbers are keyed with `seed`."""

    def __init__(self, rows: Rows, *, device: torch.device, seed: int) -> None:
        self.rows = rows
        self.seed = seed
        self._device = device
        self._is_there = rows.device == device

    def batches(self, requests: Iterable[Request]) -> Iterator[Batch]:
        """The batches asked for, in order, one operation for each tensor."""
        for _, tensors in self.tensors(requests):
            yield self.rows.pack(tensors)

    def tensors(self, requests: Iterable[Request]) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """For each request its indices as they came, and the rows, transformed and on the device."""
        if self._is_there:
            for indices, epoch in requests:
                there = to_device(indices, self._device)
                yield indices, self._transformed(self.rows.gather(there), there, epoch)
            return
        shown: deque[Request] = deque()  # what is being copied ahead

        def gathered() -> Iterator[Batch]:
            for request in requests:
                shown.append(request)
                yield request.indices, self.rows.gather(request.indices.to(self.rows.device))

        for there, tensors in on_device(gathered(), self._device):
            indices, epoch = shown.popleft()
            yield indices, self._transformed(tensors, there, epoch)

    def _transformed(self, tensors: list[Tensor], there: Tensor, epoch: int) -> list[Tensor]:
        if self.rows.transform is None:
            return tensors
        return self.rows.transformed(tensors, there, key=batch_key(self.seed, epoch))


@final
class WindowGatherer:
    """The full windows of one rank, several at a time. Where one is too large for that, `windows_at_once` is 0."""

    def __init__(self, source: RowSource, plan: BatchPlan, *, rank: int) -> None:
        self._source = source
        self._global_batch_size = plan.global_batch_size
        self._packs = source.rows.pack is not list  # which they are already
        parts = micro_batches(plan, global_count=plan.global_batch_size, rank=rank)
        self._sizes = [len(part) for part in parts]
        multiple, bytes_per_row = _layout(source)
        # Rows of one batch, and as many more as the next one needs to begin where memory is aligned.
        self._stride = -(-max(self._sizes) // multiple) * multiple
        self._columns = torch.tensor([[min(part[0] + i, part[-1]) for i in range(self._stride)] for part in parts])
        window_bytes = max(1, self._columns.numel() * bytes_per_row)
        # Large rows of an odd size begin aligned so rarely that filling up would cost more than it saves.
        is_dense = self._stride <= 2 * max(self._sizes) or bytes_per_row <= _SMALL_ROW_BYTES
        self.windows_at_once = min(MOST_WINDOWS, MOST_BYTES // window_bytes) if is_dense else 0

    def windows(self, order: Tensor, *, epoch: int, to_the_end: bool) -> Iterator[Window]:
        """The windows of `order`, the indices of whole global batches one after another. Loads some windows at once.

        to_the_end: nothing of the epoch follows.
        """
        if not len(order):
            return
        size, number, left = self._global_batch_size, len(self._sizes), len(order) // self._global_batch_size
        requests = (Request(self._positions(chunk), epoch) for chunk in order.split(self.windows_at_once * size))
        for indices, tensors in self._source.tensors(requests):
            rows = map(list, zip(*map(self._parts, tensors), strict=True))
            batches = map(self._source.rows.pack, rows) if self._packs else rows
            micro_batches = map(MicroBatch, batches, cycle(self._sizes))
            shown = map(MicroIndices, self._parts(indices), cycle(self._sizes))
            # One after another from the same iterators: zip deals as many to each window.
            for dealt, micros in zip(
                zip(*[shown] * number, strict=True), zip(*[micro_batches] * number, strict=True), strict=True
            ):
                left -= 1
                taken = iter(micros)
                yield Window(taken, number, size, to_the_end and left == 0, dealt)
                assert next(taken, None) is None, NOT_TAKEN

    def _positions(self, chunk: Tensor) -> Tensor:
        """The indices in `chunk` that this rank gets, each batch filled up to the stride."""
        return chunk.view(-1, self._global_batch_size).index_select(1, self._columns.flatten()).flatten()

    def _parts(self, tensor: Tensor) -> list[Tensor]:
        """The memory of each micro-batch, without what was filled up."""
        every = tensor.view(-1, self._stride, *tensor.shape[1:])
        if self._sizes[0] < self._stride:
            every = every[:, : self._sizes[0]]
        views = list(every.unbind())
        if self._sizes[-1] < self._sizes[0]:  # they differ by one at most, the larger ones first
            number = len(self._sizes)
            views = [view[: self._sizes[i % number]] for i, view in enumerate(views)]
        # Tensors of their own to autograd: a task may change its batch in place, and keep it for its graph.
        return [view.data for view in views]


def _layout(source: RowSource) -> tuple[int, int]:
    """Of how many rows a multiple begins aligned in every tensor, and the bytes of a row, transformed or not.

    Seen in one sample.
    """
    first = Request(torch.zeros(1, dtype=torch.int64), 0)
    _, made = next(source.tensors([first]))
    kept = [row_bytes(tensor) for tensor in source.rows.tensors]
    sizes = [row_bytes(tensor) for tensor in made]
    multiple = lcm(*(_ALIGNMENT_BYTES // gcd(_ALIGNMENT_BYTES, size) for size in (*kept, *sizes)))
    return multiple, max(sum(kept), sum(sizes))
