"""The windows of a `framework.Source`, whose batches are made with the model: nothing is loaded ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from framework.data.batching import BatchPlan
from framework.data.epochs import EpochSizes, EpochSteps
from framework.data.identity import DataIdentity, check_size
from framework.data.order import epoch_positions, windows
from framework.data.skipping import NO_SKIPS, EpochSkips, end_without_step, parts_of_positions
from framework.errors import DataError
from framework.types import Batch, MicroBatch, Source, Span, Waiting, Window

MakeBatch = Callable[[Window, int], Batch]
"""Makes this rank's batch of a window's micro-batch, by its index."""


@final
class SourceLoader:
    """This rank's part of every global batch of a source. `connect` must be called before a batch is taken.

    limit: batches of each process per epoch at most, or a share of them. accumulated: batches of a process in a step.
    Raises DataError for a source of an epoch without a step.
    """

    whole = None
    """A source isn't kept in memory."""

    collates = False
    """No collate function makes the batches."""

    lists = None
    """No batch sampler lists the batches."""

    def __init__(
        self, source: Source, *, plan: BatchPlan, rank: int, limit: int | float | None = None, accumulated: int = 1
    ) -> None:
        self.source = source
        size = len(source)
        self.sizes = EpochSizes(size)
        """Samples of each epoch, regardless of a limit."""
        self.steps = EpochSteps(self.sizes, plan, limit, accumulated)
        """The optimizer steps of each epoch."""
        self.plan = plan
        """How a global batch is split."""
        self.global_batch_size = plan.global_batch_size
        self._rank = rank
        self._size = size
        self._make_batch: MakeBatch | None = None
        if self.steps.constant == 0:
            raise DataError(
                f"An epoch of {type(source).__name__} has {size} samples, and a global batch takes "
                f"{plan.global_batch_size}.\nReturn more from its __len__, or use a smaller data.batch_size."
            )

    def connect(self, make_batch: MakeBatch) -> None:
        """Set what makes the batches."""
        self._make_batch = make_batch

    def epoch(
        self, epoch: int, start: int = 0, *, limit: int | None = None, skips: EpochSkips = NO_SKIPS
    ) -> Iterator[Window]:
        """Yield the windows of `epoch` from sample `start` on. A micro-batch is made when it is taken.

        limit: global batches of the epoch at most; None: the loader's own limit. skips: what to pass over. Raises
        DataError if `start` isn't inside the epoch.
        """
        if limit is None:
            limit = self.steps.of(epoch)
        positions = epoch_positions(self._size, self.plan, start=start, limit=limit, may_be_over=bool(skips.late))
        if not skips:
            yield from self._windows(positions.start, positions.stop)
            return
        for part in parts_of_positions(positions, self.global_batch_size, skips):
            begin, end = part.positions
            if begin == end:
                yield end_without_step(part.passed)
            yield from part.marked(self._windows(begin, end))

    def indices_at(self, span: Span) -> Tensor:
        """Return the indices of samples by their positions in the epoch's order, which are the same."""
        return torch.arange(span.begin, span.end)

    def _windows(self, begin: int, end: int) -> Iterator[Window]:
        """Yield the windows of the samples at these positions."""
        order = torch.arange(self._size)
        for part in windows(order, self.plan, rank=self._rank, start=begin, end=end):
            number = len(part.micro_batches)
            window = Window(iter(()), number, part.global_count, part.epoch_end, part.micro_batches)
            yield window._replace(micro_batches=self._micro_batches(window))

    def _micro_batches(self, window: Window) -> Iterator[MicroBatch]:
        assert self._make_batch is not None, "connect is called before"
        for index, micro in enumerate(window.indices):
            yield MicroBatch(self._make_batch(window, index), micro.num_samples)

    @property
    def identity(self) -> DataIdentity:
        """What a resumed run compares: the size of an epoch."""
        return DataIdentity(self._size)

    def load_identity(self, saved: DataIdentity, *, samples: int) -> None:
        """Raise CheckpointError if the checkpoint, after `samples` of an epoch, is of an epoch of another size."""
        if samples > 0:
            check_size(saved, size=self._size)

    def state_dict(self) -> None:
        """Return nothing: the number of samples taken is all the state of the loader."""

    def load_state_dict(self, states: Sequence[Mapping[str, Any]], *, samples: int) -> None:
        """Nothing to load."""

    def observe_waiting(self, waiting: Waiting) -> None:
        """Report nothing: ranks don't wait for each other to load."""

    def close(self) -> None:
        """Nothing to close."""
