"""Read an IterableDataset window by window, in this process or in a worker.

Generators are seeded by (seed, epoch, position in the stream): what the dataset draws depends on neither the number of
ranks nor earlier interruptions. A collate function draws by (seed, epoch, position of its first sample).
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import Dataset, IterableDataset

from framework.data.batching import BatchPlan, micro_batches, share
from framework.data.fetch import collate, user_error
from framework.data.keyed_random import KeyedRandom
from framework.data.set_epoch import EpochListeners
from framework.distributed.seed import mix, preserved_generators, seed_generators
from framework.errors import DataError
from framework.types import Batch, Collate, MicroBatch

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
        if self.is_sharded:
            return self.rank
        return 0

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


class Digest(NamedTuple):
    """A summary of a sample, by which ranks see if they have read the same one."""

    # Of its integers, strings and shapes.
    checksum: float
    # The sum of its floats' absolute values. Different processors may compute floats a little differently.
    float_sum: float


class WindowSamples(NamedTuple):
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
    digest: Digest


@final
class StreamReader(Dataset["WindowSamples | None"]):
    """Reads a dataset window by window, in this process or a worker. Generators of the caller are restored.

    Raises RunError that names the sample if the dataset raises.
    """

    def __init__(self, dataset: IterableDataset[Any], plan: StreamPlan) -> None:
        self._dataset = dataset
        self._plan = plan
        self._windows: Iterator[WindowSamples] = iter(())
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

    def __getitem__(self, start: StreamPosition | None) -> WindowSamples | None:
        """Return the first window after `start`, or the next one for None; None if there are no more."""
        if start is not None:
            self._windows = self._read(start)
        return next(self._windows, None)

    def _read(self, start: StreamPosition) -> Iterator[WindowSamples]:
        self._begin_at(start)
        plan = self._plan
        window_size = plan.own_samples(plan.batches.global_batch_size)
        while True:
            number = window_size
            if plan.limit is not None:
                number = min(window_size, plan.own_samples(plan.limit) - self._position)
            begin = self._position
            samples = self._take(number)
            if not samples:
                return
            micro, positions = self._collate(samples, begin=begin)
            end = StreamPosition(start.epoch, self._position, self._state())
            with self._drawing("digest", begin):
                digest = _digest(samples[0], plan.collate_fn)
            yield WindowSamples(micro, positions, len(samples), end, digest)

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


def _digest(sample: Any, collate_fn: Collate | None) -> Digest:
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
    return Digest(checksum, float_sum)


def first_batch(dataset: IterableDataset[Any], *, number: int, split: str, collate_fn: Collate | None = None) -> Batch:
    """Return a batch of the first samples, repeated if there are fewer. Raises DataError for an empty stream."""
    plan = StreamPlan(split, BatchPlan(number, 1, 1), collate_fn=collate_fn)
    window = StreamReader(dataset, plan)[StreamPosition(0)]
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
