"""The batches of one rank from a stream: an IterableDataset, whose samples come one after another.

`StreamReader` (stream_reader.py) reads the samples, in this process or in a worker.

All ranks have the same windows, though each may read a shard of its own. The ranks exchange how many samples each has
for a window two windows ahead, beside the computation. So before a window's first forward every rank knows its number
of micro-batches and of samples, and if it is the epoch's last. A rank that has fewer micro-batches takes stand-ins of
weight 0, and joins the others in every forward and backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice, repeat
from typing import Any, NamedTuple, final

import torch
from torch.utils.data import IterableDataset

from framework.data.batching import BatchPlan, count_windows
from framework.data.identity import DataIdentity, check_size
from framework.data.prefetch import SideStream, pins_memory, prefetch
from framework.data.stream_reader import (
    Digest,
    StreamPlan,
    StreamPosition,
    StreamReader,
    WindowSamples,
    has_state,
    no_samples,
)
from framework.data.workers import ItemLoader
from framework.distributed.collectives import SideChannel, Table
from framework.errors import CheckpointError, DataError
from framework.types import Batch, MicroBatch, MicroIndices, Waiting, Window


class _RankSummary(NamedTuple):
    """What each rank sends the others about a window."""

    # Which stream the rank reads.
    source: float
    # The number of samples that it has read.
    size: float
    # It has a batch that can stand in.
    has_batch: float
    checksum: float
    float_sum: float


class _AgreedWindow(NamedTuple):
    """A window once all ranks know of it; the same on every rank but for `samples`."""

    # What this rank has read; None: its stream has ended.
    samples: WindowSamples | None
    # Samples of each source.
    counts: Mapping[int, int]
    # There is no such window.
    is_over: bool


@final
class StreamLoader:
    """This rank's part of every window of a stream. All ranks make one with the same plan, limit and rule.

    Args:
        plan: How this rank reads.
        exchange: Used from `epoch` on.
        stops_first: An epoch ends when the first rank has nothing left, not when all have.
        check_state: Raises for a state of the dataset that can't be saved; None if none is to be.
    """

    size = None
    """Unknown: a stream has no length."""

    whole = None
    """A stream isn't kept in memory."""

    def __init__(
        self,
        dataset: IterableDataset[Any],
        *,
        plan: StreamPlan,
        device: torch.device,
        exchange: SideChannel,
        stops_first: bool = False,
        check_state: Callable[[Any], object] | None = None,
    ) -> None:
        if plan.is_sharded:
            dataset = _shard(dataset, plan)
        reader = StreamReader(dataset, plan)
        self._reader = ItemLoader(reader, name=f"{plan.split} stream", num_workers=int(plan.in_worker))
        self._loads_state = has_state(dataset)
        self._plan = plan
        self._exchange = exchange
        self._stops_first = stops_first
        self._check_state = check_state
        self._device = device
        self._side_stream: SideStream | None = None
        if pins_memory(device):
            self._side_stream = SideStream(device)
        self._waiting: Waiting | None = None
        # The last batch that was read, to stand in, and its number of samples.
        self._batch: Batch | None = None
        self._batch_size = 0
        # After the window that was yielded last.
        self._position = StreamPosition(0)
        # Where the next epoch continues, after a resume in the middle of one.
        self._resumed: StreamPosition | None = None

        self.collates = plan.collate_fn is not None
        """True if a collate function of the user's makes the batches: it may drop samples."""
        self.global_batch_size = plan.batches.global_batch_size
        self.steps_per_epoch: int | None = None
        """At most; None if unknown."""
        if plan.limit is not None:
            self.steps_per_epoch = count_windows(plan.limit, global_batch_size=self.global_batch_size)

    @property
    def plan(self) -> BatchPlan:
        """How a global batch is split."""
        return self._plan.batches

    @property
    def is_sharded(self) -> bool:
        """Each rank reads a shard of its own."""
        return self._plan.is_sharded

    def observe_waiting(self, waiting: Waiting) -> None:
        """Tell `waiting` when this rank waits for others."""
        self._waiting = waiting

    def epoch(self, epoch: int, start: int = 0, *, limit: int | None = None) -> Iterator[Window]:
        """Yield the windows of `epoch` after its first `start` samples over all ranks. Every rank must call it.

        Take all micro-batches of a window before the next window; stop after the same window on every rank. Raises
        DataError if there is no sample, or if ranks that should read the same don't; RunError if a sample can't be
        read; and what `check_state` raises.

        Args:
            limit: windows at most, besides the plan's limit; None: no further limit.
        """
        return islice(self._windows(epoch, start), limit)

    def _windows(self, epoch: int, start: int) -> Iterator[Window]:
        position = StreamPosition(epoch, start)
        if start and self._resumed is not None:
            position = self._resumed._replace(epoch=epoch)
            self._resumed = None
        self._position = position

        # A window is yielded once the ranks have agreed on the next one, and while the one after that is exchanged.
        read = self._reader.items(chain([position], repeat(None)))
        first = self._begin(read)
        begun = self._begin(read)
        window = self._agree(*first, epoch=epoch)
        self._check_first(window, position, start=start)
        while not window.is_over:
            begun_after = self._begin(read)
            next_window = self._agree(*begun, epoch=epoch)
            begun = begun_after
            if window.samples is not None:
                self._position = window.samples.end
            self._position = self._position._replace(has_ended=next_window.samples is None)
            yield self._window(window, epoch_end=next_window.is_over)
            window = next_window

    def _check_first(self, first: _AgreedWindow, position: StreamPosition, *, start: int) -> None:
        """Raise DataError if there is no first window after `start`; and what `check_state` raises."""
        is_missing = first.samples is None and not position.has_ended
        if start and (first.is_over or is_missing):
            raise DataError(
                f"Training can't continue at sample {start} of the {self._plan.split} stream: in epoch "
                f"{position.epoch} a process finds no more.\nIt must give the same samples as when the checkpoint was "
                "made, and trainer.limit_train_batches must not be smaller."
            )
        if first.is_over:
            raise no_samples(self._plan.split, epoch=position.epoch)
        # Now, and not hours later, when the state is to be saved.
        if first.samples is not None and self._check_state is not None:
            self._check_state(first.samples.end.state)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this rank after the window that was yielded last; see `load_state_dict`."""
        plan = self._plan
        position = self._position
        state = None
        # Of ranks that read the same, the first keeps the state.
        if not position.has_ended and (plan.is_sharded or plan.rank == 0):
            state = position.state
        return {
            "shards": self._shards,
            "stops_first": self._stops_first,
            "shard": plan.source,
            "samples": position.samples,
            "has_ended": position.has_ended,
            "state": state,
        }

    def load_state_dict(self, states: Sequence[Mapping[str, Any]], *, samples: int) -> None:
        """Continue from the `states` of all ranks, after `samples` of the epoch. Every rank must call it.

        If all ranks read the same, their number may differ. Raises CheckpointError if the shards or the rule of the
        epoch's end were others.
        """
        self._resumed = None
        if samples == 0 or not states:
            return
        rules = {(state["shards"], state["stops_first"]) for state in states}
        if rules != {(self._shards, self._stops_first)}:
            raise CheckpointError(
                "The checkpoint is in the middle of an epoch of a stream that was read with another data.stream, or by "
                "another number of processes that each read a shard.\n"
                "Resume with the same number of processes and data.stream, or from a checkpoint of an epoch's end."
            )
        own = next(state for state in states if state["shard"] == self._plan.source)
        resumed = StreamPosition(epoch=0, samples=samples, has_ended=bool(own["has_ended"]))
        if self._plan.is_sharded:
            resumed = resumed._replace(samples=own["samples"])
        if self._loads_state:
            resumed = resumed._replace(state=own["state"])
        self._resumed = resumed

    @property
    def identity(self) -> DataIdentity:
        """All that is known is that it is a stream."""
        return DataIdentity(None)

    def load_identity(self, saved: DataIdentity, *, samples: int) -> None:
        """Raise CheckpointError if the checkpoint, after `samples` of an epoch, is of data that was no stream."""
        if samples > 0:
            check_size(saved, size=None)

    def close(self) -> None:
        """End the worker that reads ahead; may be called again."""
        self._reader.close()

    @property
    def _shards(self) -> int | None:
        """How many shards the stream is read in; None if every rank reads all of it."""
        if not self._plan.is_sharded:
            return None
        return self._plan.batches.world_size

    def _begin(self, read: Iterator[WindowSamples]) -> tuple[WindowSamples | None, Callable[[], Table]]:
        """Read what this rank has for a window, and start to send a summary of it to the others."""
        size = 0
        digest = Digest(0.0, 0.0)
        samples = next(read, None)
        if samples is not None:
            self._batch = samples.micro_batches[0].batch
            self._batch_size = len(samples.positions[0])
            size = samples.size
            digest = samples.digest
        summary = _RankSummary(self._plan.source, size, self._batch is not None, digest.checksum, digest.float_sum)
        return samples, self._exchange.gather(summary)

    def _agree(self, samples: WindowSamples | None, summaries: Callable[[], Table], *, epoch: int) -> _AgreedWindow:
        """Wait for what all ranks have for a window."""
        if self._waiting is not None:
            self._waiting.begin_waiting()
        rows = [_RankSummary(*row) for row in summaries()]
        counts = self._counts(rows, epoch=epoch)
        total = sum(counts.values())
        is_short = self._plan.batches.drop_last and total < self.global_batch_size
        is_over = total == 0 or is_short or (self._stops_first and min(counts.values()) == 0)
        if not is_over and not all(row.has_batch for row in rows):
            source = next(rank for rank, row in enumerate(rows) if row.size)
            batch, batch_size = self._exchange.broadcast((self._batch, self._batch_size), source=source)
            if self._batch is None:
                self._batch = batch
                self._batch_size = batch_size
        if self._waiting is not None:
            self._waiting.end_waiting()
        return _AgreedWindow(samples, counts, is_over)

    def _counts(self, rows: Sequence[_RankSummary], *, epoch: int) -> dict[int, int]:
        """Return the samples of each source. Raises DataError, on every rank, if ranks of one source read others."""
        first: dict[float, tuple[int, _RankSummary]] = {}
        for rank, row in enumerate(rows):
            other_rank, other = first.setdefault(row.source, (rank, row))
            is_near = math.isclose(row.float_sum, other.float_sum, rel_tol=1e-4)
            if row.size != other.size or row.checksum != other.checksum or not is_near:
                raise DataError(
                    f"Ranks {other_rank} and {rank} don't read the same {self._plan.split} stream: in epoch {epoch} "
                    f"they have {other.size:.0f} and {row.size:.0f} samples of a global batch, which differ.\n"
                    "A stream must give the same samples in every process: seed what it draws, and don't let it look "
                    "at its rank. If each process is to read a shard of its own, use data.stream=join."
                )
        return {int(source): int(row.size) for source, (_, row) in first.items()}

    def _window(self, agreed: _AgreedWindow, *, epoch_end: bool) -> Window:
        micro_batches: list[MicroBatch] = []
        positions: list[range] = []
        if agreed.samples is not None:
            micro_batches += agreed.samples.micro_batches
            positions += agreed.samples.positions

        # Stand-ins, so that this rank joins the others in every forward and backward.
        numbers = [len(self._plan.micro_batches(count, source=source)) for source, count in agreed.counts.items()]
        while len(micro_batches) < max(numbers):
            micro_batches.append(MicroBatch(self._batch, 0))
            positions.append(range(self._batch_size))

        first_rank = None
        shard_sizes = None
        if self._plan.is_sharded:
            first_rank = min(source for source, count in agreed.counts.items() if count)
            shard_sizes = [agreed.counts[rank] for rank in range(self._plan.batches.world_size)]
        sizes = [micro.num_samples for micro in micro_batches]
        indices = [torch.arange(place.start, place.stop) for place in positions]
        batches = prefetch((micro.batch for micro in micro_batches), self._device, side_stream=self._side_stream)
        return Window(
            map(MicroBatch, batches, sizes),
            len(micro_batches),
            sum(agreed.counts.values()),
            epoch_end,
            tuple(map(MicroIndices, indices, sizes)),
            first_rank,
            shard_sizes,
        )


def _shard(dataset: IterableDataset[Any], plan: StreamPlan) -> IterableDataset[Any]:
    """Return this rank's shard of the stream, by the dataset's `shard`. Raises DataError if it has none."""
    take = getattr(dataset, "shard", None)
    if not callable(take):
        raise DataError(
            f"The {plan.split} stream, a {type(dataset).__name__}, has no shard(num_shards, index), by which "
            "data.stream=join and stop let each process read a shard of its own.\n"
            "Write that method, or use data.stream=shared: all processes read the same stream."
        )
    return take(num_shards=plan.batches.world_size, index=plan.rank)  # type: ignore[no-any-return]
