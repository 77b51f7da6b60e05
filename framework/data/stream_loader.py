"""The batches of one rank from streams: `StreamLoader` for optimizer steps, `StreamEvalLoader` for every sample once.

Every window begins and ends on all ranks, though each may read a stream of its own: how many samples each has for the
next windows is exchanged beside the computation, two windows ahead, so that all know before a window's first forward
how many micro-batches it has, of how many samples, and whether it is the epoch's last. A rank that has fewer takes a
stand-in of weight 0, and meets the others in every forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, final

import torch
from torch.utils.data import IterableDataset

from framework.data.batching import BatchPlan
from framework.data.device import pins_memory
from framework.data.prefetch import SideStream, on_device
from framework.data.stream import Chunk, Deal, Place, Reading, chunks, has_state, no_samples
from framework.data.workers import read_ahead
from framework.distributed.exchange import Exchange, Table
from framework.errors import CheckpointError, DataError
from framework.types import Batch, MicroBatch, MicroIndices, Waiting, Window

_TOLERANCE = 1e-4
"""By how much, as a share of it, the mean size of a sample's fractions may differ between processors."""


class _Row(NamedTuple):
    """What a rank tells of a window: of which stream it reads, how many samples, whether it has a batch to stand in."""

    source: float
    size: float
    has_batch: float
    digest: float
    mean: float


class _Begun(NamedTuple):
    """What this rank has read for a window, None where its stream has ended, and the way to what others have."""

    chunk: Chunk | None
    told: Callable[[], Table]


class _Dealt(NamedTuple):
    """The same once all is known: the samples of each source. is_over: there is no such window."""

    chunk: Chunk | None
    counts: Mapping[int, int]
    number: int
    is_over: bool


@final
class StreamLoader:
    """This rank's part of every window of a stream. All ranks make one with the same plan, limit and rule.

    exchange: used from `epoch` on. stops_first: an epoch ends where the first rank has nothing left, else where all
    have. check_state: raises for a state of the dataset that can't be saved; None where none is to be.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        *,
        deal: Deal,
        reading: Reading,
        device: torch.device,
        exchange: Exchange,
        stops_first: bool = False,
        check_state: Callable[[Any], object] | None = None,
    ) -> None:
        self._running: Generator[Chunk, None, None] | None = None
        self._dataset = dataset if not deal.is_sharded else shard(dataset, deal, part=reading.part)
        self._deal, self._reading, self._part, self._limit = deal, reading, reading.part, reading.limit
        self._exchange, self._stops_first, self._check_state = exchange, stops_first, check_state
        self._device = device
        self._copier = SideStream(device) if pins_memory(device) else None
        self._batch: Batch | None = None  # the last one read, to stand in
        self._resumed: Place | None = None
        self._stands = Place(0)
        self._waiting: Waiting | None = None

    @property
    def size(self) -> None:
        """Unknown: a stream has no length."""

    @property
    def steps_per_epoch(self) -> int | None:
        """At most; None if unknown."""
        return None if self._limit is None else -(-self._limit // self.global_batch_size)

    @property
    def global_batch_size(self) -> int:
        return self._deal.plan.global_batch_size

    def tell_waiting(self, waiting: Waiting) -> None:
        """Have it told when this rank waits for others."""
        self._waiting = waiting

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Window]:
        """The windows of `epoch` from `start` on, how many samples of it all ranks have taken. Every rank must call it.

        Take all micro-batches of a window before the next window; stop after the same window on every rank. Raises
        DataError where there is no sample, and where ranks that should read the same don't; RunError where a sample
        can't be read; and what `check_state` raises.
        """
        place = self._place(epoch, start)
        self._stands = place
        read = self._read(place)
        first, following = self._begin(read), self._begin(read)
        here = self._settle(first, epoch=epoch)
        if here.is_over or (start and here.chunk is None and not place.has_ended):
            raise self._nothing_at(epoch, start, here.counts)
        if here.chunk is not None and self._check_state is not None:
            self._check_state(here.chunk.state)  # now, and not hours later, when it is to be saved
        while not here.is_over:
            after = self._begin(read)
            ahead, following = self._settle(following, epoch=epoch), after
            if here.chunk is not None:
                self._stands = Place(epoch, here.chunk.end, here.chunk.state)
            self._stands = self._stands._replace(has_ended=ahead.chunk is None)
            yield self._window(here, epoch_end=ahead.is_over)
            here = ahead

    def state_dict(self) -> dict[str, Any]:
        """Where this rank stands after the window that was given last; see `load_state_dict`."""
        shards = self._deal.plan.world_size if self._deal.is_sharded else None
        place = self._stands
        tells = not place.has_ended and (self._deal.is_sharded or self._deal.rank == 0)  # of the same, the first does
        return {
            "shards": shards,
            "stops_first": self._stops_first,
            "shard": self._deal.source,
            "samples": place.samples,
            "has_ended": place.has_ended,
            "state": place.state if tells else None,
        }

    def load_state_dict(self, states: Sequence[Mapping[str, Any]], *, samples: int) -> None:
        """Go on where the ranks stood: `states` of each, `samples` of the epoch taken. Every rank must call it.

        Where all read the same, on any number of ranks. Raises CheckpointError where it was other shards, or an epoch
        of another end; DataError where one has taken as much as it may, or more.
        """
        self._resumed = None
        if samples == 0:
            return
        shards = self._deal.plan.world_size if self._deal.is_sharded else None
        now = shards, self._stops_first
        found = {(each["shards"], each.get("stops_first", self._stops_first)) for each in states} or {(None, False)}
        if found != {now}:
            raise CheckpointError(
                f"The checkpoint is in the midst of an epoch of {_told(*next(iter(found)))}, and this run reads "
                f"{_told(*now)}.\n"
                "Resume with as many processes and data.stream as they were, or from a checkpoint of an epoch's end."
            )
        for each in states if shards else ():
            self._check_limit(each["samples"], of=replace(self._deal, rank=each["shard"]))
        mine = next((state for state in states if state["shard"] == self._deal.source), None)
        if mine is None:  # all read the same, and what was saved is of a data set that isn't a stream
            self._resumed = Place(0, samples)
        else:
            own = mine["samples"] if shards else samples
            state = mine["state"] if has_state(self._dataset) else None
            self._resumed = Place(0, own, state, bool(mine["has_ended"]))

    def close(self) -> None:
        """End what reads ahead; may be called again."""
        if self._running is not None:
            self._running.close()
            self._running = None

    def _read(self, place: Place) -> Iterator[Chunk]:
        self.close()  # an epoch that was left early
        make = partial(chunks, self._dataset, self._deal, place, self._reading)
        self._running = read_ahead(make) if self._reading.in_worker else make()
        return self._running

    def _place(self, epoch: int, start: int) -> Place:
        if start == 0:
            return Place(epoch)
        if self._limit is not None and start >= self._limit:
            raise _lowered(start, self._limit, what="an epoch of")
        place, self._resumed = self._resumed or Place(epoch, start), None
        return place._replace(epoch=epoch)

    def _check_limit(self, samples: int, *, of: Deal) -> None:
        """Raise DataError where a rank that has read so many would in a whole epoch have stopped before."""
        end = None if self._limit is None else of.reads(self._limit)
        if end and samples >= end:
            raise _lowered(samples, end, what=f"the part of process {of.rank}, of which an epoch has")

    def _nothing_at(self, epoch: int, start: int, counts: Mapping[int, int]) -> DataError:
        """Why an epoch can't begin, or can't go on at `start`."""
        if start:
            return DataError(
                f"Training can't go on at sample {start} of the {self._part} stream: in epoch {epoch} a process "
                "finds no more.\nIt must give the same samples as when the checkpoint was made."
            )
        empty = [source for source, count in counts.items() if count == 0]
        if len(empty) == len(counts):
            return no_samples(self._part, epoch=epoch)
        return DataError(
            f"data.stream=stop ends an epoch with the first part that has nothing left, and in epoch {epoch} what "
            f"shard(num_shards={len(counts)}, index) of the {self._part} stream gives has no sample for index "
            f"{', '.join(map(str, empty))}.\nUse data.stream=join, fewer processes, or data in more parts."
        )

    def _begin(self, read: Iterator[Chunk]) -> _Begun:
        """Read what this rank has for a window, and tell the others."""
        chunk = next(read, None)
        if chunk is not None:
            self._batch = chunk.micro_batches[0].batch
        count, mean = (0, (0.0, 0.0)) if chunk is None else (chunk.size, chunk.digest)
        return _Begun(chunk, self._exchange.begin(_Row(self._deal.source, count, self._batch is not None, *mean)))

    def _settle(self, begun: _Begun, *, epoch: int) -> _Dealt:
        """Learn what all ranks have for a window; the same on every rank but for the chunk."""
        if self._waiting is not None:
            self._waiting.begin_waiting()
        rows = [_Row(*row) for row in begun.told()]
        counts = self._counts(rows, epoch=epoch)
        total = sum(counts.values())
        is_over = total == 0 or (self._stops_first and min(counts.values()) == 0)
        if not is_over and not all(row.has_batch for row in rows):
            giver = next(rank for rank, row in enumerate(rows) if row.size)
            given = self._exchange.give(self._batch, source=giver)
            self._batch = given if self._batch is None else self._batch
        if self._waiting is not None:
            self._waiting.end_waiting()
        number = max(len(self._deal.parts(count, source=source)) for source, count in counts.items()) if total else 0
        return _Dealt(begun.chunk, counts, number, is_over)

    def _counts(self, rows: Sequence[_Row], *, epoch: int) -> dict[int, int]:
        """Samples of each stream. Raises DataError, on every rank, where ranks have read other things of the same."""
        first: dict[float, tuple[int, _Row]] = {}
        for rank, row in enumerate(rows):
            other, found = first.setdefault(row.source, (rank, row))
            if not _is_same(row, found):
                sizes = f"{found.size:.0f} samples on one, {row.size:.0f} on the other"
                differs = "which aren't the same ones" if row.size == found.size else "so one ends earlier"
                raise DataError(
                    f"Ranks {other} and {rank} don't read the same {self._part} stream: in epoch {epoch} a global "
                    f"batch has {sizes}, {differs}.\n"
                    "A stream must give the same samples in every process: seed what it draws, and don't let it look "
                    "at its rank. Where each process is to read a part of its own, use data.stream=join."
                )
        return {int(source): int(row.size) for source, (_, row) in first.items()}

    def _window(self, dealt: _Dealt, *, epoch_end: bool) -> Window:
        own, places = ((), ()) if dealt.chunk is None else (dealt.chunk.micro_batches, dealt.chunk.places)
        lacking = dealt.number - len(own)
        micro_batches = (*own, *(MicroBatch(self._batch, 0) for _ in range(lacking)))
        moved = on_device((micro.batch for micro in micro_batches), self._device, copier=self._copier)
        batches = (MicroBatch(batch, micro.num_samples) for batch, micro in zip(moved, micro_batches, strict=True))
        filled = (*places, *(range(1) for _ in range(lacking)))
        indices = (torch.arange(each.start, each.stop) for each in filled)
        shown = tuple(map(MicroIndices, indices, (micro.num_samples for micro in micro_batches)))
        first_rank = None
        if self._deal.is_sharded:
            first_rank = min(source for source, count in dealt.counts.items() if count)
        return Window(batches, dealt.number, sum(dealt.counts.values()), epoch_end, shown, first_rank)


@final
class StreamEvalLoader:
    """This rank's part of a stream to evaluate: over all ranks every sample exactly once.

    Where all read the same, rank r takes batch r, r + W, …, and of what is left at the end a share. The same draws in
    every evaluation. is_even: ranks have as many batches, by stand-ins of no samples. Every rank must iterate.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        *,
        deal: Deal,
        reading: Reading,
        device: torch.device,
        exchange: Exchange,
        is_even: bool = False,
    ) -> None:
        self._is_even = is_even
        self.turns = None if deal.is_sharded else deal.plan.global_batch_size // deal.plan.world_size
        """Samples that each rank takes in turn, in the order of the stream; None where it reads a part of its own."""
        self._loader = StreamLoader(dataset, deal=deal, reading=reading, device=device, exchange=exchange)

    def __iter__(self) -> Iterator[MicroBatch]:
        return self.first(None)

    def first(self, number: int | None) -> Iterator[MicroBatch]:
        """Return this rank's batches of the first `number` windows, None for all. Every rank must iterate."""
        for window in islice(self._loader.epoch(0), number):
            yield from (micro for micro in window.micro_batches if micro.num_samples or self._is_even)
        self._loader.close()

    def close(self) -> None:
        self._loader.close()


def evaluation_plan(batch_size: int, *, world_size: int) -> BatchPlan:
    """A batch for each rank at a time."""
    return BatchPlan(batch_size * world_size, 1, world_size)


def shard(dataset: IterableDataset[Any], deal: Deal, *, part: str) -> IterableDataset[Any]:
    """This rank's part of the stream, as the dataset's `shard` gives it. Raises DataError where it can't."""
    number, index = deal.plan.world_size, deal.rank
    take = getattr(dataset, "shard", None)
    if not callable(take):
        raise DataError(
            f"data.stream=join and stop let each process read a part of its own, and the {part} stream, a "
            f"{type(dataset).__name__}, has no shard(num_shards, index).\n"
            "Write that method, which gives the part; or use data.stream=shared, by which all read the same stream."
        )
    try:
        return take(num_shards=number, index=index)  # type: ignore[no-any-return]
    except Exception as error:
        raise DataError(
            f"The {part} stream, a {type(dataset).__name__}, gives no shard {index} of {number}: "
            f"{type(error).__name__}: {error}\nUse as many processes as it can be cut into, or data.stream=shared."
        ) from error


def _is_same(one: _Row, other: _Row) -> bool:
    near = abs(one.mean - other.mean) <= _TOLERANCE * max(one.mean, other.mean)
    return one.size == other.size and one.digest == other.digest and near


def _told(shards: int | None, stops_first: bool) -> str:
    if shards is None:
        return "a stream that all processes share"
    return f"a stream in {shards} shard(s) with data.stream={'stop' if stops_first else 'join'}"


def _lowered(samples: int, limit: int, *, what: str) -> DataError:
    return DataError(
        f"Training can't go on at sample {samples} of {what} at most {limit} samples.\n"
        "trainer.limit_train_batches is smaller than when the checkpoint was made: set it back."
    )
