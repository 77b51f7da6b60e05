"""Load batches on the CPU with torch's DataLoader, in this process or by worker processes.

Random transforms draw from generators seeded per sample, by (seed, epoch, position in the epoch's order). So their
numbers depend on neither ranks nor workers, and a sample that comes twice in an epoch is augmented twice. A collate
function draws by (seed, epoch, position of its first sample).
"""

from __future__ import annotations

import io
import os
import pickle
import signal
import sys
import traceback
from collections import ChainMap
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from framework.data.epoch_listeners import EpochListeners
from framework.data.keyed_random import KeyedRandom
from framework.data.prefetch import pinned
from framework.data.sample_check import (
    CheckedSamples,
    CheckKey,
    check_rows,
    check_samples,
)
from framework.data.sample_random import Draws
from framework.data.tensor_samples import as_tensor_samples
from framework.distributed.seed import mix
from framework.errors import FrameworkError, RunError
from framework.types import Batch, Collate, MapDataset

_EXIT_S = 1.0  # to wait for the exit of a worker that has closed its connection
_START_METHOD = "fork" if sys.platform.startswith("linux") else "spawn"


class BatchRequest(NamedTuple):
    """A batch to load: consecutive samples in the epoch's order."""

    # Indices into the dataset, int64.
    indices: Tensor
    # Position of the first sample in the epoch's order.
    position: int
    # The epoch that seeds the random numbers of samples.
    epoch: int
    # The epoch that `set_epoch` of the dataset gets.
    dataset_epoch: int


class BatchKey(NamedTuple):
    """A BatchRequest in plain numbers: sending a tensor to a worker would take shared memory and a thread."""

    indices: list[int]
    position: int
    epoch: int
    dataset_epoch: int


@final
class BatchDataset(Dataset[Batch]):
    """Whole batches of a dataset, on the CPU: by one indexing operation per tensor if samples are rows of tensors.

    split: `train`, `val` or `test`, for messages. collate_fn: None for torch's.
    """

    def __init__(self, dataset: MapDataset, *, split: str, seed: int, collate_fn: Collate | None = None) -> None:
        self._dataset, self._split, self._seed, self._collate_fn = dataset, split, seed, collate_fn
        self._rows = as_tensor_samples(dataset) if collate_fn is None else None
        self._random = KeyedRandom(dataset, collate_fn)
        self._has_loaded = False
        self._listeners = EpochListeners(dataset, collate_fn, seed=seed)

    def set_epoch(self, epoch: int) -> None:
        """Call `set_epoch` of the dataset and what it holds, and of the collate function, if the epoch is a new one.

        Each process has its own copies of them. Raises RunError if one of them raises.
        """
        if tell_epoch(self._listeners, epoch, split=self._split):
            self._random.find()
            self._has_loaded = False

    def __getitem__(self, key: BatchKey | CheckKey) -> Batch | CheckedSamples:
        """Return the batch for a key. Raises RunError, which names the sample that failed."""
        if isinstance(key, CheckKey):
            return self._check(key.indices)
        self.set_epoch(key.dataset_epoch)
        if self._rows is not None:
            index_B = torch.tensor(key.indices, device=self._rows.device)
            position_B = torch.arange(key.position, key.position + len(index_B), device=self._rows.device)
            draws = batch_draws(position_B, seed=self._seed, epoch=key.epoch)
            return self._rows.pack(self._rows.transformed(self._rows.gather(index_B), draws))
        batch = self._load(key)
        is_new = self._random.find_new() if self._has_loaded else self._random.find()
        self._has_loaded = True
        # The first sample, or the collate function, may have created a generator and used it unseeded.
        return self._load(key) if is_new else batch

    def _check(self, indices: list[int]) -> CheckedSamples:
        """Load samples twice, and make a batch of them twice. Changes neither the dataset nor generators."""
        if self._rows is not None:
            return check_rows(self._rows, indices, seed=self._seed, device=self._rows.device)
        checked = check_samples(
            self._dataset, indices, collate_fn=self._collate_fn, random=self._random, seed=self._seed
        )
        # If samples change from epoch to epoch, a sketch of them can't tell if the data has changed.
        return replace(checked, sketch=None) if self._listeners else checked

    def _load(self, key: BatchKey) -> Batch:
        with self._random.preserved():
            samples = []
            for position, index in enumerate(key.indices, start=key.position):
                sample_seed = mix(self._seed, "sample", key.epoch, position)
                self._random.seed(sample_seed)
                sample = load_sample(self._dataset, index, split=self._split)
                if self._random.find_new():
                    # It may have drawn from the new generator before that was seeded, so load it again.
                    self._random.seed(sample_seed)
                    sample = load_sample(self._dataset, index, split=self._split)
                samples.append(sample)
            name = f"Samples {key.indices} of the {self._split} dataset"
            if self._collate_fn is None:
                return collate(samples, name=name)
            self._random.seed(mix(self._seed, "collate", key.epoch, key.position))
            return collate(samples, name=name, collate_fn=self._collate_fn)


def batch_draws(position_B: Tensor, *, seed: int, epoch: int) -> Draws:
    """Return the random numbers of samples at these positions of the epoch's order."""
    return Draws(partial(mix, seed, "batch", epoch), position_B)


def collate(samples: list[Any], *, name: str, collate_fn: Collate | None = None) -> Batch:
    """Make a batch of samples. Raises RunError, which calls them `name`, if that isn't possible."""
    try:
        return default_collate(samples) if collate_fn is None else collate_fn(samples)
    except Exception as error:
        if collate_fn is not None:
            raise failed_sample(f"The collate function, given {name[0].lower()}{name[1:]},", error) from error
        raise RunError(
            f"{name} don't make a batch: {type(error).__name__}: {error}\n"
            "Every sample must have the same structure, with tensors of the same shapes. Else set data.collate_fn."
        ) from error


def load_sample(dataset: MapDataset, index: int, *, split: str) -> Any:
    """Return `dataset[index]`. Raises RunError that names the sample if the dataset raises."""
    try:
        return dataset[index]
    except Exception as error:
        raise failed_sample(f"Sample {index} of the {split} dataset", error) from error


def tell_epoch(listeners: EpochListeners, epoch: int, *, split: str, again: bool = False) -> bool:
    """Call `set_epoch(epoch)` of each listener, see `EpochListeners.tell`. Raises RunError if one raises."""
    try:
        return listeners.tell(epoch, again=again)
    except Exception as error:
        raise failed_sample(f"set_epoch({epoch}) for the {split} dataset", error) from error


def failed_sample(name: str, error: BaseException) -> RunError:
    """Return an error, which is shown without its traceback, with the frames of the dataset's code that led to it."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is our own call
    stack = "\n".join(f"  {frame.filename}, line {frame.lineno}, in {frame.name}: {frame.line}" for frame in frames)
    return RunError(f"{name} raised {_described(error)}\n{stack}")


# torch's DataLoader


class ItemLoader:
    """A DataLoader of whole items, such as batches. Workers start with the first `items` and are kept until `close`.

    Args:
        name: What is loaded, for messages: `train dataset`.
    """

    def __init__(self, dataset: Dataset[Any], *, name: str, num_workers: int, pin_memory: bool = False) -> None:
        self._keys = _Keys()
        self._name = name
        self._loader: DataLoader[Any] | None = DataLoader(
            _InWorker(dataset, name) if num_workers else dataset,
            sampler=self._keys,
            batch_size=None,
            collate_fn=_unchanged,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            # Without workers `to_device` does it; torch's own loader doesn't know every form of batch.
            pin_memory=pin_memory and num_workers > 0,
            worker_init_fn=partial(_init_worker, parent=os.getpid()),
            # Forked workers share the dataset's memory and are our children, as the request to die with us needs.
            multiprocessing_context=_START_METHOD if num_workers else None,
            # Its own, so that the numbers it draws for the workers don't shift the generator that training draws from.
            generator=torch.Generator(),
        )

    def items(self, keys: Iterable[Any]) -> Iterator[Any]:
        """Yield `dataset[key]` for each key, in order. A new call discards what an earlier one has not consumed.

        Without workers, each item is loaded when it is taken. Raises RunError if a worker can't load or send an item,
        and torch's RuntimeError if a worker has died.
        """
        if self._loader is None:
            raise RuntimeError("This loader was closed.")
        self._keys.keys = keys
        for item in self._loader:
            yield self._unpacked(item) if isinstance(item, _FromWorker) else item

    def close(self) -> None:
        """End the worker processes; may be called again."""
        workers = self._workers()
        self._loader = None  # the DataLoader's iterator ends them when it is let go
        for worker in workers:
            if worker.is_alive():  # stuck in a sample; it ignores the signal that asked it to end
                worker.kill()
                worker.join()

    def _workers(self) -> list[Any]:
        """Return the worker processes that were started."""
        return getattr(getattr(self._loader, "_iterator", None), "_workers", [])

    def _unpacked(self, item: _FromWorker) -> Any:
        try:
            return item.unpacked(self._name)
        except (EOFError, OSError) as error:
            # Shared memory is fetched from the worker that has sent it, which may have died meanwhile.
            for worker in self._workers():
                worker.join(_EXIT_S)
                status = worker.exitcode
                if status is None:
                    continue
                ended = f"exited unexpectedly with exit code {status}"
                if status < 0:
                    ended = f"is killed by signal: {signal.strsignal(-status)}"
                raise RuntimeError(
                    f"DataLoader worker (pid {worker.pid}) {ended}. What it had loaded from the {self._name} is lost."
                ) from error
            raise


@final
class _Keys:
    """What the DataLoader takes for its sampler: it yields the keys set last."""

    def __init__(self) -> None:
        self.keys: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys)


# What a worker sends


@final
class _InWorker(Dataset[Any]):
    """Loads items in a worker, and returns a pickled item or an error, which can always be sent.

    torch's own worker pickles in a thread, so the rank would wait forever for an item that can't be pickled. It sends
    an exception itself, which may fail in the same way, and it exits silently on anything that isn't an Exception.
    """

    def __init__(self, dataset: Dataset[Any], name: str) -> None:
        self._dataset, self._name = dataset, name
        self._pickled = _pickled

    def __getitem__(self, key: Any) -> _FromWorker:
        try:
            item = self._dataset[key]
        except BaseException as error:
            return _FromWorker(failure=_failure(error, f"A data worker of the {self._name}"))
        try:
            return _FromWorker(self._pickled(item))
        except Exception:
            # Don't try it again for later items: an attempt that fails may leave shared memory open.
            self._pickled = _pickled_by_value
        try:
            return _FromWorker(self._pickled(item))
        except Exception as error:
            text = (
                f"What a worker loaded from the {self._name} can't be sent to its rank: {_described(error)}\n"
                "A batch may hold all that pickle and cloudpickle take, so no open files, locks or generators. "
                "data.num_workers=0 loads in the rank's own process, without sending."
            )
            # The report adds advice about files and memory, but only to errors that aren't the framework's.
            kind = RuntimeError if isinstance(error, (OSError, RuntimeError)) else RunError
            return _FromWorker(failure=(kind, text))


@final
class _FromWorker:
    """A pickled item from a worker, or the class and the text of the error to raise instead."""

    def __init__(self, data: bytes = b"", *, failure: tuple[type[Exception], str] | None = None) -> None:
        self._data, self._failure = data, failure

    def unpacked(self, name: str) -> Any:
        """Return the item, or raise the worker's error."""
        if self._failure is not None:
            kind, text = self._failure
            raise kind(text)
        try:
            return pickle.loads(self._data)
        except (EOFError, OSError, RuntimeError):  # no more files or shared memory, or the worker has ended
            raise
        except Exception as error:
            raise RunError(
                f"What a worker loaded from the {name} can't be read by its rank: {_described(error)}\n"
                "Give its class a __reduce__ or __setstate__ that can be undone, or set data.num_workers=0."
            ) from error

    def pin_memory(self) -> Any:
        """Return the item in page-locked memory. Called by the DataLoader's thread, if there is one."""
        if self._failure is not None:
            return self
        return pinned(self.unpacked("dataset"))


def _pickled(item: Any) -> bytes:
    """Return the item pickled; tensors go through shared memory."""
    return bytes(ForkingPickler.dumps(item))


def _pickled_by_value(item: Any) -> bytes:
    """Return the item pickled by value, with classes that can't be imported: those of a script or notebook."""
    import cloudpickle

    reducers = ChainMap(ForkingPickler._extra_reducers, cloudpickle.Pickler.dispatch_table)  # type: ignore[attr-defined]

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        dispatch_table = reducers

    buffer = io.BytesIO()
    Pickler(buffer).dump(item)
    return buffer.getvalue()


def _failure(error: BaseException, name: str) -> tuple[type[Exception], str]:
    """Return the class and the text of an error that a rank can raise in place of this one."""
    if not isinstance(error, FrameworkError):
        return RunError, str(failed_sample(name, error))
    ours = [kind for kind in type(error).__mro__ if kind.__module__ == FrameworkError.__module__]
    return ours[0], str(error)


def _described(error: BaseException) -> str:
    """Return the class and the text of an error. Its `__str__` may raise, too."""
    try:
        text = str(error)
    except Exception:
        text = "(its text can't be shown)"
    return f"{type(error).__name__}: {text}"


def _init_worker(_worker: int, *, parent: int) -> None:
    from framework.system.signals import STOP_SIGNALS, die_with_parent

    die_with_parent(parent)
    if sys.platform.startswith("linux"):
        # Schedulers and terminals signal every process. Training continues for some steps then, and needs its data; a
        # handler that does nothing, unlike SIG_IGN, isn't inherited by programs that a dataset starts.
        for number in STOP_SIGNALS:
            signal.signal(number, lambda *_: None)


def _unchanged(item: Any) -> Any:
    return item
