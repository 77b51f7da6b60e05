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
from framework.data.epochs import EpochSteps
from framework.data.identity import DataIdentity, check_size
from framework.data.prefetch import SideStream, pins_memory, prefetch
from framework.data.shard_reader import is_same_sample
from framework.data.skipping import NO_SKIPS, EpochSkips, end_without_step
from framework.data.stream_plan import Digest, ShardPosition, StreamPlan, Turns, resumed_turns
from framework.data.stream_reader import ReaderStart, StreamReader, WindowSamples, no_samples, shard_of
from framework.data.workers import ItemLoader
from framework.distributed.collectives import SideChannel, Table
from framework.errors import CheckpointError, DataError
from framework.types import Batch, MicroBatch, MicroIndices, Passed, Span, Waiting, Window


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


class _ReadWindow(NamedTuple):
    """What this rank has read for a window, and which of its readers did."""

    reader: int
    samples: WindowSamples


class _AgreedWindow(NamedTuple):
    """A window once all ranks know of it; the same on every rank but for `read`."""

    # None: all shards of this rank have ended.
    read: _ReadWindow | None
    # Samples of each source.
    counts: Mapping[int, int]
    # There is no such window.
    is_over: bool


class _HeldWindow(NamedTuple):
    """A window that waits for the next one."""

    window: _AgreedWindow
    # Those right before it.
    skipped: Sequence[_AgreedWindow]
    passed: Passed | None


@final
class StreamLoader:
    """This rank's part of every window of a stream. All ranks make one with the same plan, limit and rule.

    Args:
        plan: How this rank reads.
        exchange: Used from `epoch` on.
        stops_first: An epoch ends when the first rank has nothing left, not when all have.
        check_state: Raises for a state of the dataset that can't be saved; None if none is to be.
    """

    sizes = None
    """Unknown: a stream has no length."""

    whole = None
    """A stream isn't kept in memory."""

    lists = None
    """No batch sampler lists the batches."""

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
        self._splits_itself = _splits_itself(dataset, plan)
        reader = StreamReader(dataset, plan)
        self._reader = ItemLoader(reader, name=f"{plan.split} stream", num_workers=plan.num_workers)
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
        self._turns = Turns.at_start(plan)
        # The samples of the epoch over all ranks, if each of its windows had been complete.
        self._nominal_samples = 0
        # Where the next epoch continues, after a resume in the middle of one.
        self._resumed: Turns | None = None

        self.collates = plan.collate_fn is not None
        """True if a collate function of the user's makes the batches: it may drop samples."""
        self.global_batch_size = plan.batches.global_batch_size
        self.steps: EpochSteps | None = None
        """The optimizer steps of each epoch at most; None if unknown."""
        if plan.limit is not None:
            num_windows = count_windows(plan.limit, global_batch_size=self.global_batch_size)
            self.steps = EpochSteps(None, plan.batches, num_windows)

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

    def epoch(
        self, epoch: int, start: int = 0, *, limit: int | None = None, skips: EpochSkips = NO_SKIPS
    ) -> Iterator[Window]:
        """Yield the windows of `epoch` after its first `start` samples over all ranks. Every rank must call it.

        Take all micro-batches of a window before the next window; stop after the same window on every rank. Raises
        DataError if there is no sample, or if ranks that should read the same don't; RunError if a sample can't be
        read; and what `check_state` raises.

        Args:
            limit: windows at most, besides the plan's limit; None: no further limit.
            skips: what to read without training on it.
        """
        return islice(self._windows(epoch, start, skips), limit)

    def _windows(self, epoch: int, start: int, skips: EpochSkips) -> Iterator[Window]:
        """Yield each window once it is known if the epoch has a later one that isn't skipped."""
        skipped: list[_AgreedWindow] = []
        spans: list[Span] = []
        held: _HeldWindow | None = None
        # Samples of the epoch over all ranks.
        samples = start
        for number, window in enumerate(self._agreed_windows(epoch, start), start=skips.first):
            span = Span(samples, samples + sum(window.counts.values()))
            samples = span.end
            if number in skips.dropped:
                skipped.append(window)
                spans.append(span)
                continue
            if held is not None:
                yield self._take(held, epoch_end=False)
            held = _HeldWindow(window, skipped, passed=Passed(tuple(spans)) if spans else None)
            skipped = []
            spans = []
        if held is None:
            yield end_without_step(Passed(tuple(spans)))
            return
        if spans:
            held = held._replace(passed=(held.passed or Passed())._replace(after=tuple(spans)))
        yield self._take(held, epoch_end=True)

    def _agreed_windows(self, epoch: int, start: int) -> Iterator[_AgreedWindow]:
        """Yield all windows after the first `start` samples, while the next one is exchanged."""
        self._start(start)
        windows_left = math.inf
        if self._plan.limit is not None:
            windows_left = count_windows(
                self._plan.limit - self._nominal_samples, global_batch_size=self.global_batch_size
            )

        read = self._read(epoch)
        first = self._begin(read)
        begun = self._begin(read)
        window = self._agree(*first, epoch=epoch)
        self._check_first(window, epoch=epoch, start=start, is_limited=windows_left <= 0)
        while not window.is_over:
            yield window
            begun_after = self._begin(read)
            window = self._agree(*begun, epoch=epoch)
            begun = begun_after
            windows_left -= 1
            if windows_left <= 0:
                return

    def _take(self, held: _HeldWindow, *, epoch_end: bool) -> Window:
        """Return a window to train on. What is read next comes after it."""
        for window in [*held.skipped, held.window]:
            if window.read is not None:
                samples = window.read.samples
                self._turns.advance(window.read.reader, samples.shard, samples.end)
            self._nominal_samples += self.global_batch_size
        return self._window(held.window, epoch_end=epoch_end)._replace(passed=held.passed)

    def _start(self, start: int) -> None:
        """Go to where an epoch starts: after `start` samples over all ranks."""
        if start and self._resumed is not None:
            self._turns = self._resumed
            self._resumed = None
            return
        self._turns = Turns.at_start(self._plan)
        self._nominal_samples = start
        if start:
            # The samples before are skipped; every rank has read all of them.
            self._turns = Turns.distributed(None, [ShardPosition(0, start)], self._plan)

    def _read(self, epoch: int) -> Iterator[_ReadWindow]:
        """Yield what the readers read, in turn. A reader whose shards have all ended is passed over."""
        num_readers = len(self._turns.queues)
        starts = [ReaderStart(epoch, self._turns.num_shards, tuple(queue)) for queue in self._turns.queues]
        # The DataLoader gives item n to worker n modulo their number.
        ended: set[int] = set()
        for number, samples in enumerate(self._reader.items(chain(starts, repeat(None)))):
            reader = number % num_readers
            if samples is not None:
                yield _ReadWindow(reader, samples)
                continue
            ended.add(reader)
            if len(ended) == num_readers:
                return

    def _check_first(self, first: _AgreedWindow, *, epoch: int, start: int, is_limited: bool) -> None:
        """Raise DataError if there is no first window after `start`; and what `check_state` raises."""
        if start and (first.is_over or is_limited):
            raise DataError(
                f"Training can't continue at sample {start} of the {self._plan.split} stream: in epoch {epoch} a "
                "process finds no more.\nIt must give the same samples as when the checkpoint was made, and "
                "trainer.limit_train_batches must not be smaller."
            )
        if first.is_over:
            raise no_samples(self._plan.split, epoch=epoch)
        # Now, and not hours later, when the state is to be saved.
        if first.read is not None and first.read.samples.end is not None and self._check_state is not None:
            self._check_state(first.read.samples.end.state)

    def state_dict(self) -> dict[str, Any]:
        """Return where this rank is after the window that was yielded last; see `load_state_dict`."""
        state: dict[str, Any] = {"is_sharded": self._plan.is_sharded}
        # Of ranks that read the same, the first keeps the state.
        if self._plan.is_sharded or self._plan.rank == 0:
            state.update(self._turns.state_dict())
        return state

    def load_state_dict(self, states: Sequence[Mapping[str, Any]], *, samples: int) -> None:
        """Continue from the `states` of all ranks. Every rank must call it.

        samples: of the epoch over all ranks, if each of its windows had been complete.

        The number of ranks and of their readers may be another one. Raises CheckpointError if the dataset splits itself
        by rank, and they differ.
        """
        self._resumed = None
        if samples == 0 or not states:
            return
        resumed = resumed_turns(states, self._plan)
        if self._splits_itself and resumed.num_shards != self._plan.num_shards:
            raise CheckpointError(
                f"The checkpoint is in the middle of an epoch of a stream that was read in {resumed.num_shards or 1} "
                f"shards, and {self._plan.num_shards or 1} are read now. shard(num_shards, index) of the "
                f"{self._plan.split} stream returns the stream itself, which looks at its rank, so they can't be "
                "assigned to other processes.\n"
                "Resume with the same number of processes, data.num_workers and data.stream, or from a checkpoint of "
                "an epoch's end."
            )
        self._resumed = resumed
        self._nominal_samples = samples

    def indices_at(self, span: Span) -> None:
        """Return nothing: samples of a stream have no index."""

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

    def _begin(self, read: Iterator[_ReadWindow]) -> tuple[_ReadWindow | None, Callable[[], Table]]:
        """Read what this rank has for a window, and start to send a summary of it to the others."""
        size = 0
        digest = Digest(0.0, 0.0)
        window = next(read, None)
        if window is not None:
            self._batch = window.samples.micro_batches[0].batch
            self._batch_size = len(window.samples.positions[0])
            size = window.samples.size
            digest = window.samples.digest
        summary = _RankSummary(self._plan.source, size, self._batch is not None, digest.checksum, digest.float_sum)
        return window, self._exchange.gather(summary)

    def _agree(self, read: _ReadWindow | None, summaries: Callable[[], Table], *, epoch: int) -> _AgreedWindow:
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
        return _AgreedWindow(read, counts, is_over)

    def _counts(self, rows: Sequence[_RankSummary], *, epoch: int) -> dict[int, int]:
        """Return the samples of each source. Raises DataError, on every rank, if ranks of one source read others."""
        first: dict[float, tuple[int, _RankSummary]] = {}
        for rank, row in enumerate(rows):
            other_rank, other = first.setdefault(row.source, (rank, row))
            digest = Digest(row.checksum, row.float_sum)
            if row.size != other.size or not is_same_sample(digest, Digest(other.checksum, other.float_sum)):
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
        if agreed.read is not None:
            micro_batches += agreed.read.samples.micro_batches
            positions += agreed.read.samples.positions

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


def _splits_itself(dataset: IterableDataset[Any], plan: StreamPlan) -> bool:
    """Return True if `shard` of the dataset returns the dataset, which then splits itself by its rank.

    Raises DataError if it can't be split into as many shards as this run needs.
    """
    if plan.num_shards is None:
        return False
    shards = []
    for index in range(plan.rank % plan.num_sources, plan.num_shards, plan.num_sources):
        shards.append(shard_of(dataset, plan, num_shards=plan.num_shards, index=index))
    return plan.is_sharded and any(shard is dataset for shard in shards)
