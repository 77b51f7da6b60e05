"""Load batches on the CPU with torch's DataLoader, in this process or by worker processes.

A random transform in a dataset draws from generators seeded per sample, by (seed, epoch, index): what it draws depends
neither on the number of ranks or workers nor on the order in which samples are loaded.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from framework.data.sample_random import Draws
from framework.data.tensor_samples import as_tensor_samples
from framework.distributed.seed import mix, preserved_generators, seed_generators
from framework.errors import FrameworkError, RunError
from framework.types import Batch, Collate, MapDataset

_START_METHOD = "fork" if sys.platform.startswith("linux") else "spawn"


class BatchRequest(NamedTuple):
    """A batch to load: `indices` of the dataset, int64, and the epoch it is for."""

    indices: Tensor
    epoch: int


@final
class BatchDataset(Dataset[Batch]):
    """Whole batches of a dataset, on the CPU: by one indexing operation per tensor if samples are rows of tensors.

    split: `train`, `val` or `test`, for messages. collate_fn: None for torch's.
    """

    def __init__(self, dataset: MapDataset, *, split: str, seed: int, collate_fn: Collate | None = None) -> None:
        self._dataset, self._split, self._seed, self._collate_fn = dataset, split, seed, collate_fn
        self._rows = as_tensor_samples(dataset) if collate_fn is None else None

    def __getitem__(self, request: tuple[list[int], int]) -> Batch:
        """Return the batch of these indices in this epoch. Raises RunError that names the sample that fails."""
        indices, epoch = request
        if self._rows is not None:
            index_B = torch.tensor(indices, device=self._rows.device)
            draws = batch_draws(index_B, seed=self._seed, epoch=epoch)
            return self._rows.pack(self._rows.transformed(self._rows.gather(index_B), draws))
        samples = []
        with preserved_generators():
            for index in indices:
                seed_generators(mix(self._seed, "sample", epoch, index))
                samples.append(load_sample(self._dataset, index, split=self._split))
        return collate(samples, name=f"Samples {indices} of the {self._split} dataset", collate_fn=self._collate_fn)


def batch_draws(index_B: Tensor, *, seed: int, epoch: int) -> Draws:
    """Return the random numbers of a batch of samples."""
    return Draws(partial(mix, seed, "batch", epoch), index_B)


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


def failed_sample(name: str, error: Exception) -> RunError:
    """Return an error, which is shown without its traceback, with the frames of the dataset's code that led to it."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is our own call
    stack = "\n".join(f"  {frame.filename}, line {frame.lineno}, in {frame.name}: {frame.line}" for frame in frames)
    return RunError(f"{name} raised {type(error).__name__}: {error}\n{stack}")


# torch's DataLoader


class ItemLoader:
    """A DataLoader of whole items, such as batches. Workers start with the first `items` and are kept until `close`."""

    def __init__(self, dataset: Dataset[Any], *, num_workers: int, pin_memory: bool = False) -> None:
        self._keys = _Keys()
        self._loader: DataLoader[Any] | None = DataLoader(
            _ReturnsErrors(dataset),
            sampler=self._keys,
            batch_size=None,
            collate_fn=_unchanged,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=pin_memory,
            worker_init_fn=partial(_init_worker, parent=os.getpid()),
            # Forked workers share the dataset's memory and are our children, as the request to die with us needs.
            multiprocessing_context=_START_METHOD if num_workers else None,
            # Its own, so that the numbers it draws for the workers don't shift the generator that training draws from.
            generator=torch.Generator(),
        )

    def items(self, keys: Iterable[Any]) -> Iterator[Any]:
        """Yield `dataset[key]` for each key, in order. A new call discards what an earlier one has not consumed.

        Without workers each is loaded when it is taken.
        """
        if self._loader is None:
            raise RuntimeError("This loader was closed.")
        self._keys.keys = keys
        for item in self._loader:
            if isinstance(item, FrameworkError):
                raise item
            yield item

    def close(self) -> None:
        """End the worker processes; may be called again."""
        started = getattr(getattr(self._loader, "_iterator", None), "_workers", [])
        self._loader = None  # the DataLoader's iterator ends them when it is let go
        for worker in started:
            if worker.is_alive():  # stuck in a sample; it ignores the signal that asked it to end
                worker.kill()
                worker.join()


@final
class _Keys:
    """What the DataLoader takes for its sampler: it yields the keys set last."""

    def __init__(self) -> None:
        self.keys: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys)


@final
class _ReturnsErrors(Dataset[Any]):
    """Returns our errors instead of raising them in a worker: torch would bury the message in a traceback."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset

    def __getitem__(self, key: Any) -> Any:
        try:
            return self._dataset[key]
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
            signal.signal(number, lambda *_: None)


def _unchanged(item: Any) -> Any:
    return item
