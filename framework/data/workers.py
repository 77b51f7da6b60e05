"""Processes that load batches ahead of time: torch's DataLoader, asked for whole batches."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from types import FrameType
from typing import Any, NamedTuple, TypeVar, final

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from framework.data.fetch import Fetch, Request, where
from framework.errors import DataError, FrameworkError, RunError
from framework.types import Batch

Item = TypeVar("Item")


class Failure(NamedTuple):
    """An error on its way from a worker; torch would bury its message in a traceback. is_of_data: a DataError."""

    message: str
    is_of_data: bool = False


@final
class Workers:
    """Worker processes, started by the first `batches` and kept until `close`."""

    def __init__(self, fetch: Fetch, *, num_workers: int, pin_memory: bool) -> None:
        self._queue = RequestQueue()
        self._loader: DataLoader[Any] | None = DataLoader(
            FetchDataset(fetch),
            batch_size=None,  # the dataset gives batches
            sampler=self._queue,
            num_workers=num_workers,
            collate_fn=_as_is,
            pin_memory=pin_memory,
            persistent_workers=True,
            worker_init_fn=partial(_init_worker, parent=os.getpid()),
            # Forked workers share the dataset's memory and are our children, as the request to die with us needs.
            multiprocessing_context="fork" if sys.platform.startswith("linux") else "spawn",
            # Its own, so that the numbers it draws for the workers don't shift the generator that training draws from.
            generator=torch.Generator(),
        )

    def batches(self, requests: Iterable[Request]) -> Iterator[Batch]:
        """The batches asked for, in order. A new call discards what an earlier one has not consumed."""
        if self._loader is None:
            raise RuntimeError("These loader workers were closed.")
        self._queue.requests = requests
        for batch in self._loader:
            if isinstance(batch, Failure):
                raise RunError(batch.message)
            yield batch

    def close(self) -> None:
        """End the worker processes; may be called again."""
        started = getattr(getattr(self._loader, "_iterator", None), "_workers", [])
        self._loader = None  # the DataLoader's iterator ends them when it is let go
        _end(started)


def read_ahead(make: Callable[[], Iterator[Item]]) -> Generator[Item, None, None]:
    """What `make` gives, made by one worker process, some items ahead. It is ended with the generator.

    Raises what a FrameworkError raised there says, as a DataError or a RunError, which is also told of an exit().
    """
    loader: DataLoader[Any] = DataLoader(
        _Made(make),
        batch_size=None,
        num_workers=1,
        collate_fn=_as_is,
        worker_init_fn=partial(_init_worker, parent=os.getpid()),
        multiprocessing_context="fork" if sys.platform.startswith("linux") else "spawn",
        generator=torch.Generator(),  # as above
    )
    items = iter(loader)
    started = list(getattr(items, "_workers", []))
    try:
        for item in items:
            if isinstance(item, Failure):
                raise (DataError if item.is_of_data else RunError)(item.message)
            yield item
    finally:
        del items
        _end(started)


def _end(workers: Iterable[Any]) -> None:
    for worker in workers:
        if worker.is_alive():  # stuck in a sample: it was asked to end, by a signal that it doesn't heed
            worker.kill()
            worker.join()


@final
class _Made(IterableDataset[Any]):
    """What the DataLoader takes for its dataset: a "sample" is a whole item."""

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._make()
        except FrameworkError as error:
            yield Failure(str(error), isinstance(error, DataError))
        except SystemExit as error:  # torch's worker would leave, and the queue with what it was about to give
            yield Failure(f"What reads the data ahead was left: SystemExit({error.code!r}).\n{where(error)}")


@final
class RequestQueue:
    """What the DataLoader takes for its sampler: iterating gives the requests set last.

    Indices travel as plain numbers: a tensor would go through shared memory, and a thread to serve it.
    """

    def __init__(self) -> None:
        self.requests: Iterable[Request] = ()

    def __iter__(self) -> Iterator[tuple[list[int], int]]:
        return ((request.indices.tolist(), request.epoch) for request in self.requests)


@final
class FetchDataset(Dataset[Batch]):
    """What the DataLoader takes for its dataset: a "sample" is a whole batch, so an epoch travels with its indices."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch

    def __getitem__(self, key: tuple[list[int], int]) -> Batch:
        indices, epoch = key
        try:
            return self._fetch(Request(torch.tensor(indices), epoch))
        except RunError as error:
            return Failure(str(error))


def _init_worker(_worker: int, *, parent: int) -> None:
    from framework.launch.lifetime import die_with_parent
    from framework.launch.signals import STOP_SIGNALS

    die_with_parent(parent)
    if sys.platform.startswith("linux"):
        # Schedulers and terminals signal every process. Training goes on for some steps then, and needs its data; a
        # handler that does nothing, unlike SIG_IGN, isn't handed on to programs that a dataset starts.
        for number in STOP_SIGNALS:
            signal.signal(number, _pay_no_heed)


def _pay_no_heed(_signal: int, _frame: FrameType | None) -> None:
    return None


def _as_is(batch: Batch) -> Batch:
    return batch
