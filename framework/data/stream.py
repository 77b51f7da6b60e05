"""Streams: an IterableDataset, whose samples come one after another.

`StreamLoader` gives the batches of one rank. `StreamReader` reads the samples, in this process or in a worker, with
generators seeded by (seed, epoch, position in the stream): what the dataset draws depends on neither the number of
ranks nor earlier interruptions. A collate function draws by (seed, epoch, position of its first sample).

All ranks have the same windows, though each may read a shard of its own. The ranks exchange how many samples each has
for a window two windows ahead, beside the computation. So before a window's first forward every rank knows its number
of micro-batches and of samples, and if it is the epoch's last. A rank that has fewer micro-batches takes stand-ins of
weight 0, and joins the others in every forward and backward.
"""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import Dataset, IterableDataset

from framework.data.batching import BatchPlan, count_windows, micro_batches, share
from framework.data.fetch import collate, user_error
from framework.data.identity import DataIdentity, check_size
from framework.data.keyed_random import KeyedRandom
from framework.data.prefetch import SideStream, pins_memory, prefetch
from framework.data.set_epoch import EpochListeners
from framework.data.workers import ItemLoader
from framework.distributed.collectives import SideChannel, Table
from framework.distributed.seed import mix, preserved_generators, seed_generators
from framework.errors import CheckpointError, DataError
from framework.types import Batch, Collate, MicroBatch, MicroIndices, Waiting, Window

_SKIPPED_AT_ONCE = 256
"""Samples that are read and thrown away at once, to get to where a run resumes."""


class StreamPosition(NamedTuple):
    """Where in a stream to start: after `samples` of this epoch."""

    epoch: int
    samples: int = 0
    # Of the dataset there; None: the samples are skipped.
    state: Any = None
    # There are no more samples.
    has_ended: bool = False


@dataclass(frozen=True)
class StreamPlan:
    """How a rank reads a split: a shard of its own, or the samples of every rank, of which it keeps its share."""

    # `train`, `val` or `test`, for messages.
    split: str
    batches: BatchPlan
    rank: int = 0
    is_sharded: bool = False
    seed: int = 0
    # Samples of an epoch over all ranks at most.
    limit: int | None = None
    # Read ahead in a process of its own.
    in_worker: bool = False
    collate_fn: Collate | None = None

    @property
    def source(self) -> int:
        """Which stream this rank reads: ranks of the same source read the same samples."""
        return self.rank if self.is_sharded else 0

    def own_samples(self, samples: int) -> int:
        """Return how many of the first `samples` over all ranks this one reads."""
        if not self.is_sharded:
            return samples
        windows, remainder = divmod(samples, self.batches.global_batch_size)
        per_window = self._shard_size(self.batches.global_batch_size, self.rank)
        return windows * per_window + self._shard_size(remainder, self.rank)

    def micro_batches(self, count: int, *, source: int) -> list[range]:
        """Return the positions of each micro-batch in the `count` samples that `source` has for a window."""
        if not self.is_sharded:
            return micro_batches(self.batches, global_count=count, rank=self.rank)
        # The shard is split as if there were no other: how many there are doesn't depend on what others have.
        shard_size = self._shard_size(self.batches.global_batch_size, source)
        plan = BatchPlan(shard_size, self.batches.micro_batches, world_size=1)
        return micro_batches(plan, global_count=count, rank=0)

    def _shard_size(self, count: int, rank: int) -> int:
        return len(share(count, rank=rank, world_size=self.batches.world_size))


# Reading


class _Digest(NamedTuple):
    """A summary of a sample, by which ranks see if they have read the same one."""

    # Of its integers, strings and shapes.
    checksum: float
    # The sum of its floats' absolute values. Different processors may compute floats a little differently.
    float_sum: float


class _WindowSamples(NamedTuple):
    """What a rank has read for one window."""

    # Those it keeps, on the CPU; a stand-in only if all ranks read the same.
    micro_batches: tuple[MicroBatch, ...]
    # The positions of each micro-batch in the stream.
    positions: tuple[range, ...]
    # The number of samples that were read.
    size: int
    # The position after them.
    end: StreamPosition
    # Of the first sample.
    digest: _Digest


@final
class StreamReader(Dataset["_WindowSamples | None"]):
    """Reads a dataset window by window, in this process or a worker. Generators of the caller are restored.

    Raises RunError that names the sample if the dataset raises.
    """

    def __init__(self, dataset: IterableDataset[Any], plan: StreamPlan) -> None:
        self._dataset = dataset
        self._plan = plan
        self._windows: Iterator[_WindowSamples] = iter(())
        # The dataset's state before it was first read. It may keep its position after an epoch that was cut short.
        self._initial: Any = None
        self._start = StreamPosition(0)
        self._iterator: Iterator[Any] | None = None
        self._has_ended = False
        self._position = 0
        # A dataset with a state keeps its generators in it.
        self._dataset_random = KeyedRandom() if has_state(dataset) else KeyedRandom(dataset)
        self._collate_random = KeyedRandom(plan.collate_fn)
        self._listeners = EpochListeners(dataset, plan.collate_fn, split=plan.split, seed=plan.seed, seeds_own=False)

    def __getitem__(self, start: StreamPosition | None) -> _WindowSamples | None:
        """Return the first window after `start`, or the next one for None; None if there are no more."""
        if start is not None:
            self._windows = self._read(start)
        return next(self._windows, None)

    def _read(self, start: StreamPosition) -> Iterator[_WindowSamples]:
        self._begin_at(start)
        plan = self._plan
        window_size = plan.own_samples(plan.batches.global_batch_size)
        limit = None if plan.limit is None else plan.own_samples(plan.limit)
        while True:
            number = window_size
            if limit is not None:
                number = min(window_size, limit - self._position)
            begin = self._position
            samples = self._take(number)
            if not samples:
                return
            micro, positions = self._collate(samples, begin=begin)
            end = StreamPosition(start.epoch, self._position, self._state())
            with self._drawing("digest", begin):
                digest = _digest(samples[0], plan.collate_fn)
            yield _WindowSamples(micro, positions, len(samples), end, digest)

    def _begin_at(self, start: StreamPosition) -> None:
        """Go to where to start: by the state of the dataset, or by skipping samples."""
        self._start = start
        self._iterator = None
        self._has_ended = start.has_ended
        needs_skipping = start.state is None and not start.has_ended
        self._position = 0 if needs_skipping else start.samples
        while self._position < start.samples:
            skipped = self._take(min(_SKIPPED_AT_ONCE, start.samples - self._position))
            if not skipped:
                return

    def _collate(self, samples: Sequence[Any], *, begin: int) -> tuple[tuple[MicroBatch, ...], tuple[range, ...]]:
        """Return this rank's micro-batches of a window's samples, and the positions of each in the stream."""
        plan = self._plan
        micro: list[MicroBatch] = []
        positions: list[range] = []
        for micro_range in plan.micro_batches(len(samples), source=plan.source):
            # Any sample will do as a stand-in: its loss is multiplied by 0.
            collated = micro_range or range(1)
            place = range(begin + collated.start, begin + collated.stop)
            name = f"Samples {place.start} to {place.stop - 1} of the {plan.split} stream"
            with self._drawing("collate", place.start):
                batch = collate([samples[i] for i in collated], name=name, collate_fn=plan.collate_fn)
            micro.append(MicroBatch(batch, len(micro_range)))
            positions.append(place)
        return tuple(micro), tuple(positions)

    @contextmanager
    def _drawing(self, purpose: str, position: int) -> Iterator[None]:
        """Let a collate function, which may be None, draw by (seed, epoch, position in the stream)."""
        if self._plan.collate_fn is None:
            yield
            return
        with self._collate_random.preserved():
            self._collate_random.seed(self._key(purpose, position))
            yield

    def _key(self, purpose: str, position: int) -> int:
        return mix(self._plan.seed, purpose, self._start.epoch, self._plan.source, position)

    def _take(self, number: int) -> list[Any]:
        """Return the next samples; fewer if the stream ends."""
        taken: list[Any] = []
        with preserved_generators():
            while len(taken) < number and not self._has_ended:
                if self._iterator is None:
                    # Once per epoch, since a shuffle buffer may keep what was drawn. A loaded state replaces this.
                    self._dataset_random.find()
                    self._dataset_random.seed(self._key("own generators", 0))
                seed_generators(self._key("stream", self._position))
                if self._iterator is None:
                    self._iterator = self._begin_epoch()
                try:
                    taken.append(next(self._iterator))
                    self._position += 1
                except StopIteration:
                    self._has_ended = True
                except Exception as error:
                    name = f"Sample {self._position} of the {self._plan.split} stream, in epoch {self._start.epoch},"
                    raise user_error(name, error) from error
        return taken

    def _begin_epoch(self) -> Iterator[Any]:
        state = self._start.state
        if self._initial is None:
            self._initial = self._state()
        elif state is None:
            state = copy.deepcopy(self._initial)
        self._listeners.set_epoch(self._start.epoch, again=True)
        if state is not None:
            self._dataset.load_state_dict(state)  # type: ignore[attr-defined]
        return iter(self._dataset)

    def _state(self) -> Any:
        """Return a copy of the dataset's state; None if it has none."""
        if not has_state(self._dataset):
            return None
        return copy.deepcopy(self._dataset.state_dict())  # type: ignore[attr-defined]


def has_state(dataset: IterableDataset[Any]) -> bool:
    """Return True if the dataset can save its position and continue from there."""
    return all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))


def _digest(sample: Any, collate_fn: Collate | None) -> _Digest:
    checksum = 0
    float_sum = 0.0
    # Collating makes tensors of numbers, also of NumPy's.
    batch = collate([sample], name="A sample", collate_fn=collate_fn)
    for leaf in tree_leaves(batch):
        if not isinstance(leaf, Tensor):
            checksum = zlib.crc32(repr(leaf).encode(), checksum)
            continue
        checksum = zlib.crc32(repr(leaf.shape).encode(), checksum)
        if leaf.is_floating_point() or leaf.is_complex():
            float_sum += float(leaf.detach().abs().double().nan_to_num(posinf=0.0).sum())
        else:
            checksum = zlib.crc32(leaf.cpu().numpy().tobytes(), checksum)
    return _Digest(checksum, float_sum)


def first_batch(dataset: IterableDataset[Any], *, number: int, split: str, collate_fn: Collate | None = None) -> Batch:
    """Return a batch of the first samples, repeated if there are fewer. Raises DataError for an empty stream."""
    plan = StreamPlan(split, BatchPlan(number, 1, 1), collate_fn=collate_fn)
    window = StreamReader(dataset, plan)[StreamPosition(0)]
    if window is None:
        raise _no_samples(split, epoch=0)
    rows = torch.arange(number) % window.size
    return tree_map_only(Tensor, lambda column: column[rows], window.micro_batches[0].batch)


def _no_samples(split: str, *, epoch: int) -> DataError:
    return DataError(
        f"The {split} stream gives no sample in epoch {epoch}. Look at the keywords of data.datasets; iter() of the "
        "dataset must restart in every epoch.\n"
        "With data.stream=stop every process needs one: use data.stream=join, or fewer processes. With "
        "data.drop_last=true there must be a whole global batch."
    )


# Loading


class _RankReport(NamedTuple):
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
    samples: _WindowSamples | None
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
        self._side_stream = SideStream(device) if pins_memory(device) else None
        self._waiting: Waiting | None = None
        # The last batch that was read, to stand in.
        self._batch: Batch | None = None
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

    def observe_waiting(self, waiting: Waiting) -> None:
        """Report to `waiting` when this rank waits for others."""
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

        # Ranks agree on a window while the one after it is being read and exchanged.
        read = self._reader.items(chain([position], repeat(None)))
        first = self._begin(read)
        following = self._begin(read)
        here = self._agree(*first, epoch=epoch)
        self._check_first(here, position, start=start)
        while not here.is_over:
            after = self._begin(read)
            ahead = self._agree(*following, epoch=epoch)
            following = after
            if here.samples is not None:
                self._position = here.samples.end
            self._position = self._position._replace(has_ended=ahead.samples is None)
            yield self._window(here, epoch_end=ahead.is_over)
            here = ahead

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
            raise _no_samples(self._plan.split, epoch=position.epoch)
        # Now, and not hours later, when the state is to be saved.
        if first.samples is not None and self._check_state is not None:
            self._check_state(first.samples.end.state)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this rank after the window that was yielded last; see `load_state_dict`."""
        plan = self._plan
        position = self._position
        # Of ranks that read the same, the first keeps the state.
        keeps_state = not position.has_ended and (plan.is_sharded or plan.rank == 0)
        return {
            "shards": self._shards,
            "stops_first": self._stops_first,
            "shard": plan.source,
            "samples": position.samples,
            "has_ended": position.has_ended,
            "state": position.state if keeps_state else None,
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
        self._resumed = StreamPosition(
            epoch=0,
            samples=own["samples"] if self._plan.is_sharded else samples,
            state=own["state"] if self._loads_state else None,
            has_ended=bool(own["has_ended"]),
        )

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
        return self._plan.batches.world_size if self._plan.is_sharded else None

    def _begin(self, read: Iterator[_WindowSamples]) -> tuple[_WindowSamples | None, Callable[[], Table]]:
        """Read what this rank has for a window, and start to send its report to the others."""
        samples = next(read, None)
        if samples is not None:
            self._batch = samples.micro_batches[0].batch
        size = 0 if samples is None else samples.size
        digest = _Digest(0.0, 0.0) if samples is None else samples.digest
        report = _RankReport(self._plan.source, size, self._batch is not None, digest.checksum, digest.float_sum)
        return samples, self._exchange.gather(report)

    def _agree(self, samples: _WindowSamples | None, reports: Callable[[], Table], *, epoch: int) -> _AgreedWindow:
        """Wait for what all ranks have for a window."""
        if self._waiting is not None:
            self._waiting.begin_waiting()
        rows = [_RankReport(*row) for row in reports()]
        counts = self._counts(rows, epoch=epoch)
        total = sum(counts.values())
        is_short = self._plan.batches.drop_last and total < self.global_batch_size
        is_over = total == 0 or is_short or (self._stops_first and min(counts.values()) == 0)
        if not is_over and not all(row.has_batch for row in rows):
            source = next(rank for rank, row in enumerate(rows) if row.size)
            batch = self._exchange.broadcast(self._batch, source=source)
            if self._batch is None:
                self._batch = batch
        if self._waiting is not None:
            self._waiting.end_waiting()
        return _AgreedWindow(samples, counts, is_over)

    def _counts(self, rows: Sequence[_RankReport], *, epoch: int) -> dict[int, int]:
        """Return the samples of each source. Raises DataError, on every rank, if ranks of one source read others."""
        first: dict[float, tuple[int, _RankReport]] = {}
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
            positions.append(range(1))

        first_rank = None
        if self._plan.is_sharded:
            first_rank = min(source for source, count in agreed.counts.items() if count)
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
