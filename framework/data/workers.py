"""Load with torch's DataLoader, in this process or by worker processes, whatever the samples are.

A worker pickles what it has loaded itself, so that an item that can't be sent, and any error, reaches the rank.
"""

from __future__ import annotations

import io
import os
import pickle
import signal
import sys
from collections import ChainMap
from collections.abc import Iterable, Iterator
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, final

import torch
from torch.utils.data import DataLoader, Dataset

from framework.data.fetch import describe, user_error
from framework.data.prefetch import pinned
from framework.errors import FrameworkError, RunError

# To wait for the exit of a worker that has closed its connection.
_EXIT_S = 1.0
_START_METHOD = "fork" if sys.platform.startswith("linux") else "spawn"


class ItemLoader:
    """A DataLoader of whole items, such as batches. Workers start with the first `items` and are kept until `close`.

    Args:
        name: What is loaded, for messages: `train dataset`.
    """

    def __init__(self, dataset: Dataset[Any], *, name: str, num_workers: int, pin_memory: bool = False) -> None:
        has_workers = num_workers > 0
        if has_workers:
            dataset = _InWorker(dataset, name)
        self._keys = _Keys()
        self._name = name
        self._loader: DataLoader[Any] | None = DataLoader(
            dataset,
            sampler=self._keys,
            batch_size=None,
            collate_fn=_unchanged,
            num_workers=num_workers,
            persistent_workers=has_workers,
            # Without workers `to_device` does it; torch's own loader doesn't know every form of batch.
            pin_memory=pin_memory and has_workers,
            worker_init_fn=partial(_init_worker, parent=os.getpid()),
            # Forked workers share the dataset's memory and are our children, as the request to die with us needs.
            multiprocessing_context=_START_METHOD if has_workers else None,
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
            if isinstance(item, _FromWorker):
                item = self._unpacked(item)
            yield item

    def close(self) -> None:
        """End the worker processes; may be called again."""
        workers = self._workers()
        # The DataLoader's iterator ends them when it is let go.
        self._loader = None
        for worker in workers:
            # It is stuck in a sample, and ignores the signal that asked it to end.
            if worker.is_alive():
                worker.kill()
                worker.join()

    def _workers(self) -> list[Any]:
        """Return the worker processes that were started."""
        iterator = getattr(self._loader, "_iterator", None)
        return getattr(iterator, "_workers", [])

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
        self._dataset = dataset
        self._name = name
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
                f"What a worker loaded from the {self._name} can't be sent to its rank: {describe(error)}\n"
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
        self._data = data
        self._failure = failure

    def unpacked(self, name: str) -> Any:
        """Return the item, or raise the worker's error."""
        if self._failure is not None:
            kind, text = self._failure
            raise kind(text)
        try:
            return pickle.loads(self._data)
        except (EOFError, OSError, RuntimeError):
            # There are no more files or no more shared memory, or the worker has ended.
            raise
        except Exception as error:
            raise RunError(
                f"What a worker loaded from the {name} can't be read by its rank: {describe(error)}\n"
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
        return RunError, str(user_error(name, error))
    # A class of the user's may not be found by the rank, so the nearest of ours is raised.
    ours = [kind for kind in type(error).__mro__ if kind.__module__ == FrameworkError.__module__]
    return ours[0], str(error)


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
