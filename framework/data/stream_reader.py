"""Read windows of a stream, an IterableDataset, in this process or in a worker: each window from one shard."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import Dataset, IterableDataset

from framework.data.batching import BatchPlan
from framework.data.fetch import collate, describe
from framework.data.shard_reader import ShardReader, digest_of
from framework.data.stream_plan import Digest, ShardPosition, StreamPlan
from framework.errors import DataError
from framework.types import Batch, Collate, MicroBatch


class ReaderStart(NamedTuple):
    """The shards that a reader takes turns with, from where each is to be read on."""

    epoch: int
    num_shards: int | None
    queue: tuple[ShardPosition, ...]


class WindowSamples(NamedTuple):
    """What a rank has read for one window."""

    # Those it keeps, on the CPU; a stand-in only if all ranks read the same.
    micro_batches: tuple[MicroBatch, ...]
    # The positions of each micro-batch in the shard.
    positions: tuple[range, ...]
    # The number of samples that were read.
    size: int
    # Of the first sample.
    digest: Digest
    shard: int
    # The position after them; None if the shard has ended.
    end: ShardPosition | None


@final
class StreamReader(Dataset["WindowSamples | None"]):
    """Reads windows from the shards of a dataset in turn, in this process or a worker.

    Raises RunError that names the sample if the dataset raises; DataError if the dataset can't be split into shards, or
    has ended before where to start; CheckpointError if it doesn't continue as it did.
    """

    def __init__(self, dataset: IterableDataset[Any], plan: StreamPlan) -> None:
        self._dataset = dataset
        self._plan = plan
        # Those of the shards that were begun, by number of shards and shard.
        self._shard_readers: dict[tuple[int | None, int], ShardReader] = {}
        # Of the dataset itself, which is whole or split by worker.
        self._own_reader: ShardReader | None = None
        self._windows: Iterator[WindowSamples] = iter(())

    def __getitem__(self, start: ReaderStart | None) -> WindowSamples | None:
        """Return the first window after `start`, or the next one for None; None if there are no more."""
        if start is not None:
            self._windows = self._read(start)
        return next(self._windows, None)

    def _read(self, start: ReaderStart) -> Iterator[WindowSamples]:
        waiting: deque[ShardReader] = deque()
        for position in start.queue:
            shard_reader = self._shard_reader(start, position.shard)
            shard_reader.begin(start.epoch, position, num_shards=start.num_shards)
            waiting.append(shard_reader)

        num_shards = start.num_shards or 1
        limit = None
        # With several shards, the loader counts windows instead.
        if self._plan.limit is not None and num_shards == self._plan.num_sources:
            limit = self._plan.own_samples(self._plan.limit)
        # The others continue: only the last window of the last shard would end the epoch.
        drops_last = self._plan.batches.drop_last and num_shards > self._plan.num_sources
        while waiting:
            shard_reader = waiting.popleft()
            window = self._window(shard_reader, limit=limit, drops_last=drops_last)
            if window is not None:
                if window.end is not None:
                    waiting.append(shard_reader)
                yield window

    def _window(self, reader: ShardReader, *, limit: int | None, drops_last: bool) -> WindowSamples | None:
        """Return the shard's next window; None if it has ended.

        Args:
            limit: Samples of the shard at most; None for all.
            drops_last: Leave out a last window that is incomplete.
        """
        begin = reader.position
        window_size = self._plan.own_samples(self._plan.batches.global_batch_size)
        number = window_size
        if limit is not None:
            number = min(window_size, limit - begin)
        samples = reader.take(number)
        if not samples or (drops_last and len(samples) < window_size):
            return None

        digest = digest_of(samples[0])
        micro_batches, positions = self._collate(reader, samples, begin=begin)
        end = None
        if limit is None or reader.position < limit:
            end = reader.end()
        return WindowSamples(micro_batches, positions, len(samples), digest, reader.shard, end)

    def _collate(
        self, reader: ShardReader, samples: Sequence[Any], *, begin: int
    ) -> tuple[tuple[MicroBatch, ...], tuple[range, ...]]:
        """Return this rank's micro-batches of a window's samples, and the positions of each in the shard."""
        plan = self._plan
        micro: list[MicroBatch] = []
        positions: list[range] = []
        for micro_range in plan.micro_batches(len(samples), source=plan.source):
            # Any sample will do as a stand-in: its loss is multiplied by 0.
            collated = micro_range or range(1)
            place = range(begin + collated.start, begin + collated.stop)
            name = f"Samples {place.start} to {place.stop - 1} of the {plan.split} stream"
            with reader.drawing("collate", place.start):
                batch = collate([samples[i] for i in collated], name=name, collate_fn=plan.collate_fn)
            micro.append(MicroBatch(batch, len(micro_range)))
            positions.append(place)
        return tuple(micro), tuple(positions)

    # Shards

    def _shard_reader(self, start: ReaderStart, shard: int) -> ShardReader:
        key = start.num_shards, shard
        if key not in self._shard_readers:
            self._shard_readers[key] = self._make_shard_reader(start, shard)
        return self._shard_readers[key]

    def _make_shard_reader(self, start: ReaderStart, shard: int) -> ShardReader:
        dataset = self._dataset
        if len(start.queue) > 1:
            # Shards that are read in turn must share neither a position nor a generator.
            dataset = copy.deepcopy(dataset)
        if start.num_shards is not None:
            part = shard_of(dataset, self._plan, num_shards=start.num_shards, index=shard)
            if part is not dataset:
                return ShardReader(part, self._plan)
        if dataset is not self._dataset:
            return ShardReader(dataset, self._plan, splits_by_worker=True)
        if self._own_reader is None:
            self._own_reader = ShardReader(dataset, self._plan, splits_by_worker=True)
        return self._own_reader


def shard_of(dataset: IterableDataset[Any], plan: StreamPlan, *, num_shards: int, index: int) -> IterableDataset[Any]:
    """Return a shard of the stream by the dataset's `shard`; the dataset itself if it is split by worker instead.

    Raises DataError if it has no `shard` and each process is to read its own, or if `shard` raises.
    """
    take = getattr(dataset, "shard", None)
    if callable(take):
        try:
            return take(num_shards=num_shards, index=index)  # type: ignore[no-any-return]
        except Exception as error:
            raise DataError(
                f"shard(num_shards={num_shards}, index={index}) of the {plan.split} stream, a "
                f"{type(dataset).__name__}, raised {describe(error)}\n"
                f"It is split into {num_shards} shards, one for each process and worker: use fewer of them "
                "(topology.procs_per_node, data.num_workers), or data that can be split further."
            ) from error
    if plan.is_sharded:
        raise DataError(
            f"The {plan.split} stream, a {type(dataset).__name__}, has no shard(num_shards, index), by which "
            "data.stream=join and stop let each process read a shard of its own.\n"
            "Write that method, or use data.stream=shared: all processes read the same stream."
        )
    return dataset


def first_batch(dataset: IterableDataset[Any], *, number: int, split: str, collate_fn: Collate | None = None) -> Batch:
    """Return a batch of the first samples, repeated if there are fewer. Raises DataError for an empty stream."""
    plan = StreamPlan(split, BatchPlan(number, 1, 1), collate_fn=collate_fn)
    window = StreamReader(dataset, plan)[ReaderStart(0, None, (ShardPosition(0),))]
    if window is None:
        raise no_samples(split, epoch=0)
    rows = torch.arange(number) % window.size
    return tree_map_only(Tensor, lambda column: column[rows], window.micro_batches[0].batch)


def no_samples(split: str, *, epoch: int) -> DataError:
    return DataError(
        f"The {split} stream gives no sample in epoch {epoch}. Look at the keywords of data.datasets; iter() of the "
        "dataset must restart in every epoch.\n"
        "With data.stream=stop every process needs one: use data.stream=join, or fewer processes. With "
        "data.drop_last=true there must be a whole global batch."
    )
