"""Read one shard of an IterableDataset, or all of it, sample by sample, from where an earlier run has stopped.

Generators are seeded by (seed, epoch, shard, position in it): what the dataset draws depends on neither the number of
ranks nor earlier interruptions. A collate function draws by the position of its first sample.
"""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, final

import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import IterableDataset

from framework.data.fetch import user_error
from framework.data.keyed_random import KeyedRandom
from framework.data.mix import Mix, saves_state
from framework.data.object_graph import reachable
from framework.data.set_epoch import EpochListeners
from framework.data.sketch import leaves_of
from framework.data.stream_plan import Digest, ShardPosition, StreamPlan
from framework.distributed.seed import mix, preserved_generators, seed_generators
from framework.errors import CheckpointError, DataError
from framework.system.rank_log import warn

_SKIPPED_AT_ONCE = 256
"""Samples that are read and thrown away at once, to get to where a run resumes."""


@final
class ShardReader:
    """Reads the samples of a shard in order. Generators of the caller are restored.

    Raises RunError that names the sample if the dataset raises.

    Args:
        dataset: The shard; or, with `splits_by_worker`, a dataset that yields the part of the worker process that
            `torch.utils.data.get_worker_info` names, which is then this shard.
    """

    def __init__(self, dataset: IterableDataset[Any], plan: StreamPlan, *, splits_by_worker: bool = False) -> None:
        self._dataset = dataset
        self._plan = plan
        self._splits_by_worker = splits_by_worker
        self._epoch = 0
        self._shard = 0
        self._num_shards: int | None = None
        # What `get_worker_info` returns to the dataset.
        self._worker_info: _WorkerInfo | None = None
        # Samples of the shard that were taken.
        self._position = 0
        self._iterator: Iterator[Any] | None = None
        self._was_read = False
        # To load before the next `iter()`.
        self._start_state: Any = None
        # The next sample, if it was read already, with its summary.
        self._ahead: list[Any] = []
        self._ahead_digest: Digest | None = None
        self._has_ended = False

        self._has_state = has_state(dataset)
        # The dataset's state before it was first read. It may keep its position after an epoch that was cut short.
        self._initial: Any = None
        if self._has_state:
            self._initial = self._state()
        # A dataset with a state keeps its generators in it.
        self._dataset_random = KeyedRandom(*_without_state(dataset))
        self._collate_random = KeyedRandom(plan.collate_fn)
        self._listeners = EpochListeners(dataset, plan.collate_fn, split=plan.split, seed=plan.seed, seeds_own=False)

    def begin(self, epoch: int, start: ShardPosition, *, num_shards: int | None) -> None:
        """Go to where to start: by the state of the dataset, or by reading the samples before it.

        Raises DataError if the shard has ended before, and CheckpointError if the next sample isn't the one that came
        next when the checkpoint was made.
        """
        self._epoch = epoch
        self._shard = start.shard
        self._num_shards = num_shards
        self._worker_info = None
        # Each source has as many workers: a dataset that looks at its rank splits by rank itself.
        num_workers = (num_shards or 1) // self._plan.num_sources
        if self._splits_by_worker and num_workers > 1:
            worker = start.shard // self._plan.num_sources
            self._worker_info = _WorkerInfo(worker, num_workers, self._dataset)
        if start.state is not None and self._has_state:
            self._restart(samples=start.samples, state=start.state)
            if self._leads_to(start):
                return
            warn(
                f"The state of the {self._plan.split} stream, a {type(self._dataset).__name__}, doesn't lead back to "
                "the next sample, as with a buffer that isn't part of it: the samples before are read again"
            )
        # Not before the first pass: then it is in that state.
        initial = self._initial if self._was_read else None
        self._restart(samples=0, state=initial)
        self._skip(start)
        if not self._leads_to(start):
            raise CheckpointError(
                f"Sample {start.samples} {self._place()} isn't the one that came next when the checkpoint was made.\n"
                "A resumed run needs the same data in the same order: seed what the dataset draws, by `set_epoch`. "
                "Resume from a checkpoint of an epoch's end, or with the data of the checkpoint."
            )

    def take(self, number: int) -> list[Any]:
        """Return the next samples; fewer if the shard ends."""
        samples = self._ahead[:number]
        if samples:
            self._ahead = []
            self._ahead_digest = None
            self._position += len(samples)
        more = self._read(number - len(samples))
        self._position += len(more)
        return samples + more

    def end(self) -> ShardPosition | None:
        """Return the position after what was taken; None if the shard has ended. Reads the next sample to know."""
        state = self._state()
        self._look_ahead()
        if not self._ahead:
            return None
        return ShardPosition(self._shard, self._position, state, self._ahead_digest)

    @property
    def shard(self) -> int:
        """The number of the shard."""
        return self._shard

    @property
    def position(self) -> int:
        """The samples of the shard that were taken."""
        return self._position

    @contextmanager
    def drawing(self, purpose: str, position: int) -> Iterator[None]:
        """Let a collate function, which may be None, draw by (seed, epoch, shard, position)."""
        if self._plan.collate_fn is None:
            yield
            return
        with self._collate_random.preserved():
            self._collate_random.seed(self._key(purpose, position))
            yield

    # Where to start

    def _restart(self, *, samples: int, state: Any) -> None:
        """Begin a new pass through the dataset, after `samples`, in this state of the dataset; None if it has none."""
        self._position = samples
        self._start_state = copy.deepcopy(state)
        self._iterator = None
        self._ahead = []
        self._ahead_digest = None
        self._has_ended = False

    def _skip(self, start: ShardPosition) -> None:
        while self._position < start.samples:
            if not self.take(min(_SKIPPED_AT_ONCE, start.samples - self._position)):
                self._raise_missing(start)

    def _leads_to(self, start: ShardPosition) -> bool:
        """Return False if the next sample isn't the one that came next when the position was saved."""
        if start.next_digest is None:
            return True
        self._look_ahead()
        if self._ahead_digest is None:
            if self._start_state is not None or not self._has_state:
                self._raise_missing(start)
            return False
        return is_same_sample(self._ahead_digest, start.next_digest)

    def _raise_missing(self, start: ShardPosition) -> NoReturn:
        raise DataError(
            f"Training can't continue at sample {start.samples} {self._place()}: a process finds no more.\n"
            "It must give the same samples as when the checkpoint was made."
        )

    def _place(self) -> str:
        stream = f"of the {self._plan.split} stream"
        if self._num_shards is not None and self._num_shards > 1:
            stream = f"of shard {self._shard} of {self._num_shards} of the {self._plan.split} stream"
        return f"{stream}, in epoch {self._epoch}"

    # Samples

    def _look_ahead(self) -> None:
        """Read the next sample, if there is one, to be taken next."""
        if not self._ahead:
            self._ahead = self._read(1)
        if self._ahead and self._ahead_digest is None:
            self._ahead_digest = digest_of(self._ahead[0])

    def _read(self, number: int) -> list[Any]:
        samples: list[Any] = []
        if number == 0 or self._has_ended:
            return samples
        with preserved_generators(), self._as_worker():
            while len(samples) < number:
                position = self._position + len(samples)
                if self._iterator is None:
                    # Once per epoch, since a shuffle buffer may keep what was drawn. A loaded state replaces this.
                    self._dataset_random.find()
                    self._dataset_random.seed(self._key("own generators", 0))
                seed_generators(self._key("stream", position))
                if self._iterator is None:
                    self._iterator = self._begin_pass()
                try:
                    samples.append(next(self._iterator))
                except StopIteration:
                    self._has_ended = True
                    break
                except Exception as error:
                    raise user_error(f"Sample {position} {self._place()},", error) from error
        self._check_split()
        return samples

    def _begin_pass(self) -> Iterator[Any]:
        self._was_read = True
        self._listeners.set_epoch(self._epoch, again=True)
        if self._start_state is not None:
            try:
                self._dataset.load_state_dict(self._start_state)  # type: ignore[attr-defined]
            except Exception as error:
                raise user_error(f"load_state_dict of the {self._plan.split} stream", error) from error
        return iter(self._dataset)

    def _state(self) -> Any:
        """Return a copy of the dataset's state; None if it has none."""
        if not self._has_state:
            return None
        return copy.deepcopy(self._dataset.state_dict())  # type: ignore[attr-defined]

    def _key(self, purpose: str, position: int) -> int:
        return mix(self._plan.seed, purpose, self._epoch, self._shard, position)

    # Splitting by worker

    @contextmanager
    def _as_worker(self) -> Iterator[None]:
        """Let `torch.utils.data.get_worker_info` name this shard if the dataset is split by it, and otherwise nothing.

        A dataset with `shard` mustn't be split a second time, and one that isn't split reads the same in any process.
        """
        before = torch_worker._worker_info
        torch_worker._worker_info = self._worker_info  # type: ignore[assignment]
        try:
            yield
        finally:
            torch_worker._worker_info = before

    def _check_split(self) -> None:
        """Raise DataError if the dataset should be split by worker, and doesn't ask which worker it is."""
        if self._worker_info is None or self._worker_info.was_asked:
            return
        raise DataError(
            f"data.num_workers={self._plan.num_workers} can't go with the {self._plan.split} stream, a "
            f"{type(self._dataset).__name__}: it has no shard(num_shards, index), and doesn't ask "
            "torch.utils.data.get_worker_info() which part to read, so every worker would read the same samples.\n"
            "Write that method, or use data.num_workers=1, which has one process read ahead, or 0."
        )


@final
class _WorkerInfo:
    """In place of torch's WorkerInfo: the dataset is to yield the part of worker `id` of `num_workers`."""

    seed = 0
    rng = None
    worker_method = "multiprocessing"

    def __init__(self, worker: int, num_workers: int, dataset: Any) -> None:
        self._id = worker
        self.num_workers = num_workers
        self.dataset = dataset
        # The dataset looks at which worker it is.
        self.was_asked = False

    @property
    def id(self) -> int:
        self.was_asked = True
        return self._id


# State


def has_state(dataset: Any) -> bool:
    """Return True if the dataset can save all of its position and continue from there."""
    if isinstance(dataset, Mix):
        return all(has_state(stream) for stream in dataset.streams)
    return saves_state(dataset) and not _has_shuffle_buffer(dataset)


def _has_shuffle_buffer(dataset: Any) -> bool:
    """Return True for a shuffled stream of Hugging Face, whose state leaves out the samples in its buffer."""
    return any(type(part).__name__ == "BufferShuffledExamplesIterable" for part in reachable(dataset))


def _without_state(dataset: Any) -> list[Any]:
    """Return the dataset, or the streams that it mixes, unless they keep their generators in a state."""
    if isinstance(dataset, Mix):
        parts = []
        for stream in dataset.streams:
            parts += _without_state(stream)
        return parts
    return [] if saves_state(dataset) else [dataset]


# Comparing samples


def is_same_sample(digest: Digest, other: Digest) -> bool:
    """Return True if the summaries are of the same sample, maybe computed on another kind of processor."""
    is_near = math.isclose(digest.float_sum, other.float_sum, rel_tol=1e-4)
    return is_near and digest.checksum == other.checksum


def digest_of(sample: Any) -> Digest:
    """Return a summary of a sample, as the dataset has yielded it."""
    checksum = 0
    float_sum = 0.0
    for leaf in leaves_of(sample):
        checksum = zlib.crc32(f"{leaf.path} {leaf.checksum}".encode(), checksum)
        float_sum += leaf.sum or 0.0
    return Digest(checksum, float_sum)
