"""Load batches on the CPU, in this process or by worker processes of torch's DataLoader.

A random transform in a dataset draws from generators seeded per sample, by (seed, epoch, index): what it draws depends
neither on the number of ranks or workers nor on the order in which samples are loaded.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from types import FrameType
from typing import Any, NamedTuple, TypeVar, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from framework.data.tensor_samples import TensorRows, rows_of
from framework.distributed.seed import mix, preserved_generators, seed_generators
from framework.errors import FrameworkError, RunError
from framework.types import Batch, MapDataset

Item = TypeVar("Item")


class BatchRequest(NamedTuple):
    """A batch to load: `indices` of the dataset, int64, and the epoch it is for."""

    indices: Tensor
    epoch: int


Fetch = Callable[[BatchRequest], Batch]
"""Loads and collates the samples of a request, on the CPU."""


def fetch_for(dataset: MapDataset, *, part: str, seed: int) -> Fetch:
    """Return how to load batches of `dataset`: by one indexing operation per tensor if samples are rows of tensors."""
    rows = rows_of(dataset)
    if rows is not None:
        return partial(_fetch_rows, rows, seed=seed)
    return partial(_fetch_samples, dataset, part=part, seed=seed)


def batch_key(seed: int, epoch: int) -> int:
    """Return the key of the random numbers that transforms of batches draw."""
    return mix(seed, "batch", epoch)


def _fetch_rows(rows: TensorRows, request: BatchRequest, *, seed: int) -> Batch:
    indices = request.indices.to(rows.device)
    return rows.pack(rows.transformed(rows.gather(indices), indices, key=batch_key(seed, request.epoch)))


def _fetch_samples(dataset: MapDataset, request: BatchRequest, *, part: str, seed: int) -> Batch:
    indices, samples = request.indices.tolist(), []
    with preserved_generators():
        for index in indices:
            seed_generators(mix(seed, "sample", request.epoch, index))
            samples.append(load_sample(dataset, index, part=part))
    return collate(samples, name=f"Samples {indices} of the {part} dataset")


def collate(samples: list[Any], *, name: str) -> Batch:
    """Make a batch of samples. Raises RunError, which calls them `name`, if that isn't possible."""
    try:
        return default_collate(samples)
    except Exception as error:
        raise RunError(
            f"{name} don't make a batch: {type(error).__name__}: {error}\n"
            "Every sample must have the same structure, with tensors of the same shapes."
        ) from error


def load_sample(dataset: MapDataset, index: int, *, part: str) -> Any:
    """Return `dataset[index]`. Raises RunError that names the sample if the dataset raises."""
    try:
        return dataset[index]
    except Exception as error:
        raise failed_sample(f"Sample {index} of the {part} dataset", error) from error


def failed_sample(name: str, error: Exception) -> RunError:
    """Return an error, which is shown without its traceback, with the frames of the dataset's code that led to it."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is our own call
    stack = "\n".join(f"  {frame.filename}, line {frame.lineno}, in {frame.name}: {frame.line}" for frame in frames)
    return RunError(f"{name} raised {type(error).__name__}: {error}\n{stack}")


# Worker processes


@final
class Workers:
    """Worker processes, started by the first `batches` and kept until `close`."""

    def __init__(self, fetch: Fetch, *, num_workers: int, pin_memory: bool) -> None:
        self._sampler = _RequestSampler()
        self._loader: DataLoader[Any] | None = _data_loader(
            _Batches(fetch),
            sampler=self._sampler,
            num_workers=num_workers,
            pin_memory=pin_memory,
            persistent_workers=True,
        )

    def batches(self, requests: Iterable[BatchRequest]) -> Iterator[Batch]:
        """Yield the batches asked for, in order. A new call discards what an earlier one has not consumed."""
        if self._loader is None:
            raise RuntimeError("These loader workers were closed.")
        self._sampler.requests = requests
        for batch in self._loader:
            yield _unless_failed(batch)

    def close(self) -> None:
        """End the worker processes; may be called again."""
        started = getattr(getattr(self._loader, "_iterator", None), "_workers", [])
        self._loader = None  # the DataLoader's iterator ends them when it is let go
        _end(started)


def read_ahead(make: Callable[[], Iterator[Item]]) -> Generator[Item, None, None]:
    """Yield what `make` yields in one worker process, some items ahead. The process ends with the generator.

    Raises a FrameworkError that was raised there.
    """
    items = iter(_data_loader(_Items(make), num_workers=1))
    started = list(getattr(items, "_workers", []))
    try:
        for item in items:
            yield _unless_failed(item)
    finally:
        del items
        _end(started)


def _data_loader(dataset: Dataset[Any], **options: Any) -> DataLoader[Any]:
    """Return a DataLoader whose dataset gives whole batches, or items, instead of samples."""
    return DataLoader(
        dataset,
        batch_size=None,
        collate_fn=_unchanged,
        worker_init_fn=partial(_init_worker, parent=os.getpid()),
        # Forked workers share the dataset's memory and are our children, as the request to die with us needs.
        multiprocessing_context="fork" if sys.platform.startswith("linux") else "spawn",
        # Its own, so that the numbers it draws for the workers don't shift the generator that training draws from.
        generator=torch.Generator(),
        **options,
    )


def _unless_failed(item: Any) -> Any:
    """Raise an error that a worker has given instead of a batch: torch would bury its message in a traceback."""
    if isinstance(item, FrameworkError):
        raise item
    return item


def _end(workers: Iterable[Any]) -> None:
    for worker in workers:
        if worker.is_alive():  # stuck in a sample; it ignores the signal that asked it to end
            worker.kill()
            worker.join()


@final
class _Items(IterableDataset[Any]):
    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._make()
        except FrameworkError as error:
            yield error


@final
class _RequestSampler:
    """What the DataLoader takes for its sampler: it yields the requests set last.

    Indices travel as plain numbers: a tensor would go through shared memory, and a thread to serve it.
    """

    def __init__(self) -> None:
        self.requests: Iterable[BatchRequest] = ()

    def __iter__(self) -> Iterator[tuple[list[int], int]]:
        return ((request.indices.tolist(), request.epoch) for request in self.requests)


@final
class _Batches(Dataset[Batch]):
    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch

    def __getitem__(self, key: tuple[list[int], int]) -> Batch:
        indices, epoch = key
        try:
            return self._fetch(BatchRequest(torch.tensor(indices), epoch))
        except FrameworkError as error:
            return error


def _init_worker(_worker: int, *, parent: int) -> None:
    from framework.system.parent_death import die_with_parent
    from framework.system.signals import STOP_SIGNALS

    die_with_parent(parent)
    if sys.platform.startswith("linux"):
        # Schedulers and terminals signal every process. Training continues for some steps then, and needs its data; a
        # handler that does nothing, unlike SIG_IGN, isn't inherited by programs that a dataset starts.
        for number in STOP_SIGNALS:
            signal.signal(number, _do_nothing)


def _do_nothing(_signal: int, _frame: FrameType | None) -> None:
    return None


def _unchanged(batch: Batch) -> Batch:
    return batch
