"""Reading a stream: an IterableDataset, whose samples come one after another, in whichever process does it.

A sample is read with generators seeded by (seed, epoch, its place in the stream), so that what the dataset draws there
depends neither on the number of ranks nor on whether a run was resumed in between.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset

from framework.data.batching import BatchPlan, micro_batches, own_micro_batches, share
from framework.data.fetch import collated, preserved_generators, seed_generators, where
from framework.errors import DataError, RunError
from framework.seed import mix
from framework.types import Batch, MicroBatch

_BLOCK = 256  # samples that are passed over at once
_END = object()

Given = TypeVar("Given")


class Place(NamedTuple):
    """Where in a stream to go on: `samples` of this epoch were taken.

    state: of the dataset there, None where the samples are to be passed over. has_ended: there are no more.
    """

    epoch: int
    samples: int = 0
    state: Any = None
    has_ended: bool = False


@dataclass(frozen=True)
class Deal:
    """What a rank reads and keeps. is_sharded: it reads samples of its own, and keeps all.

    Else it reads those of every rank, and keeps its share of each global batch.
    """

    plan: BatchPlan
    rank: int
    is_sharded: bool

    @property
    def source(self) -> int:
        """Which stream it reads: ranks of the same source read the same samples."""
        return self.rank if self.is_sharded else 0

    def reads(self, samples: int) -> int:
        """Of so many samples over all ranks, dealt window by window, those that this one reads."""
        if not self.is_sharded:
            return samples
        windows, rest = divmod(samples, self.plan.global_batch_size)
        of_window, of_rest = (
            len(share(count, rank=self.rank, world_size=self.plan.world_size))
            for count in (self.plan.global_batch_size, rest)
        )
        return windows * of_window + of_rest

    def parts(self, count: int, *, source: int) -> list[range]:
        """The positions, in the `count` samples read for a window, of each micro-batch; those of another `source`."""
        if self.is_sharded:
            return own_micro_batches(self.plan, count=count, rank=source)
        return micro_batches(self.plan, global_count=count, rank=self.rank)


@final
class Beginning:
    """Where a dataset with a state stood before it was first read in this process, for every Reader of it.

    One that keeps its place would go on there after an epoch that was cut; a worker has a fresh one in each epoch.
    """

    def __init__(self) -> None:
        self.state: Any = None
        self.is_known = False
        self.is_left = False
        """Whether the dataset stands in the midst of an epoch."""


@dataclass(frozen=True)
class Reading:
    """How a part is read. part: its name, for messages. seed: of what is drawn. limit: samples of an epoch over all
    ranks at most. in_worker: by a process of its own, ahead. beginning: of the dataset.
    """

    part: str
    seed: int = 0
    limit: int | None = None
    in_worker: bool = False
    beginning: Beginning = field(default_factory=Beginning, compare=False)


class Chunk(NamedTuple):
    """What was read for one window: `size` samples, the kept ones in micro-batches on the CPU.

    micro_batches: as `framework.types.MicroBatch`; a stand-in only where all ranks read the same. places: of each, in
    the stream. end: the place after it, and state: of the dataset there, None where it has none. digest: of its first
    sample, see `digest`.
    """

    micro_batches: tuple[MicroBatch, ...]
    places: tuple[range, ...]
    size: int
    end: int
    state: Any
    digest: tuple[float, float]


@final
class Reader:
    """A dataset's samples from a place on. Generators of the caller are left as they were.

    Raises RunError that names the sample, or the call, where the dataset raises or calls exit(), DataError where it
    ends before the place.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        place: Place,
        *,
        part: str,
        seed: int,
        source: int,
        beginning: Beginning | None = None,
    ) -> None:
        self._dataset, self._place, self._part = dataset, place, part
        self._beginning = Beginning() if beginning is None else beginning
        self._key = (seed, "stream", place.epoch, source)
        self._iterator: Iterator[Any] | None = None
        self._has_ended = place.has_ended
        self.position = place.samples if place.state is not None or place.has_ended else 0
        """How many samples of the epoch were read."""

    def take(self, number: int) -> list[Any]:
        """The next samples; fewer where the stream ends."""
        taken: list[Any] = []
        with preserved_generators():
            while len(taken) < number and not self._has_ended:
                seed_generators(mix(*self._key, self.position))
                if self._iterator is None:
                    self._iterator = self._begun()
                named = f"Sample {self.position} of the {self._part} stream, in epoch {self._place.epoch},"
                sample = _called(partial(next, self._iterator, _END), named)
                if sample is _END:
                    self._has_ended, self._beginning.is_left = True, False
                else:
                    taken.append(sample)
                    self.position += 1
        return taken

    def go_to_place(self) -> None:
        """Pass over what was taken before."""
        while self.position < self._place.samples:
            if not self.take(min(_BLOCK, self._place.samples - self.position)):
                raise DataError(
                    f"Training can't go on at sample {self._place.samples} of the {self._part} stream: in epoch "
                    f"{self._place.epoch} it has only {self.position}.\n"
                    "It must give the same samples as when the checkpoint was made."
                )

    def state(self) -> Any:
        """Of the dataset, here: a copy. None where it keeps none."""
        if not has_state(self._dataset):
            return None
        return self._state(f"after {self.position} samples of epoch {self._place.epoch}")

    def _state(self, when: str) -> Any:
        given = _called(self._dataset.state_dict, f"state_dict() of the {self._part} stream, {when},")  # type: ignore[attr-defined]
        return _called(partial(copy.deepcopy, given), f"A copy of what state_dict() of the {self._part} stream gives")

    def _begun(self) -> Iterator[Any]:
        named, beginning = f"of the {self._part} stream, in epoch {self._place.epoch},", self._beginning
        if has_state(self._dataset) and not beginning.is_known:
            beginning.state, beginning.is_known = self._state("before its first sample"), True
        set_epoch = getattr(self._dataset, "set_epoch", None)
        if callable(set_epoch):
            _called(partial(set_epoch, self._place.epoch), f"set_epoch() {named}")
        state = self._place.state
        if state is None and beginning.is_known and beginning.is_left:
            state = copy.deepcopy(beginning.state)
        if state is not None:
            _called(partial(self._dataset.load_state_dict, state), f"load_state_dict() {named}")  # type: ignore[attr-defined]
        beginning.is_left = True
        return _called(partial(iter, self._dataset), f"iter() {named}")


def _called(call: Callable[[], Given], named: str) -> Given:
    """What a call of the dataset's gives. Raises RunError where it raises: a StopIteration would end the epoch."""
    try:
        return call()
    except (Exception, SystemExit) as error:  # a worker that exits would leave nothing to tell what happened
        raise RunError(f"{named} raised {type(error).__name__}: {error}\n{where(error)}") from error


def has_state(dataset: IterableDataset[Any]) -> bool:
    """Whether it says where it stands, and can go on from there."""
    return all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))


def chunks(dataset: IterableDataset[Any], deal: Deal, place: Place, reading: Reading) -> Generator[Chunk, None, None]:
    """What a rank reads of an epoch from `place` on, window by window, until its stream ends."""
    part, limit = reading.part, reading.limit
    reader = Reader(dataset, place, part=part, seed=reading.seed, source=deal.source, beginning=reading.beginning)
    at_once, end = deal.reads(deal.plan.global_batch_size), None if limit is None else deal.reads(limit)
    reader.go_to_place()
    while samples := reader.take(at_once if end is None else min(at_once, end - reader.position)):
        begin, count = reader.position - len(samples), len(samples)
        micro, places = [], []
        for positions in deal.parts(count, source=deal.source):
            kept = positions or range(1)  # any sample will do as a stand-in: its loss is multiplied by 0
            places.append(range(begin + kept.start, begin + kept.stop))
            named = f"Samples {places[-1].start} to {places[-1].stop - 1} of the {part} stream"
            batch = collated([samples[position] for position in kept], named=named)
            micro.append(MicroBatch(batch, len(positions)))
        first = digest(samples[0])
        yield Chunk(tuple(micro), tuple(places), count, reader.position, reader.state(), first)


def digest(sample: Any) -> tuple[float, float]:
    """Two numbers that say whether two ranks have read the same sample.

    The first is of whole numbers, texts and shapes, and must be equal; the second is the mean size of the fractions in
    it, which different processors may have computed a little differently.
    """
    exact, means = 0, []
    for leaf in tree_leaves(sample):
        value = _as_tensor(leaf)
        if isinstance(value, (str, bytes)):
            exact = zlib.crc32(value.encode() if isinstance(value, str) else value, exact)
        if not isinstance(value, Tensor):
            continue
        exact = zlib.crc32(repr((value.dtype, tuple(value.shape))).encode(), exact)
        if value.is_floating_point():
            finite = value.double()[value.isfinite()].abs()
            means.append(float(finite.mean()) if len(finite) else 0.0)
        else:
            exact = zlib.crc32(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), exact)
    return float(exact), sum(means)


def first_batch(dataset: IterableDataset[Any], *, number: int, part: str) -> Batch:
    """A batch of the stream's first samples; where it has fewer, they come again. Raises DataError for an empty one."""
    samples = Reader(dataset, Place(0), part=part, seed=0, source=0).take(number)
    if not samples:
        raise no_samples(part, epoch=0)
    named = f"The first {number} samples of the {part} stream"
    return collated([samples[position % len(samples)] for position in range(number)], named=named)


def no_samples(part: str, *, epoch: int) -> DataError:
    return DataError(
        f"The {part} stream gives no sample in epoch {epoch}. Look at the keywords of data.datasets; iter() of the "
        "dataset must begin anew in every epoch."
    )


def _as_tensor(leaf: Any) -> Any:
    """Numbers, and NumPy's, as tensors, complex ones as pairs; anything else as it is."""
    if type(leaf).__module__ == "numpy" and leaf.dtype.kind in "biufc":
        leaf = torch.as_tensor(leaf)
    if isinstance(leaf, (bool, float)):
        leaf = torch.tensor(leaf, dtype=torch.float64 if isinstance(leaf, float) else torch.bool)
    if isinstance(leaf, int):
        return str(leaf)
    if not isinstance(leaf, Tensor):
        return leaf
    leaf = leaf.detach().cpu()
    if leaf.is_quantized or leaf.layout is not torch.strided:
        return None
    return torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
