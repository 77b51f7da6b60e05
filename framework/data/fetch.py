"""From indices to a batch on the CPU, in whichever process does it.

A random transform in a dataset draws from generators seeded per sample, by (seed, epoch, index): what it draws depends
neither on the number of ranks or loader workers nor on the order in which samples are loaded.
"""

from __future__ import annotations

import random
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, final

import torch
from torch import Tensor
from torch.utils.data import default_collate

from framework.data.rows import Pieces, Rows, rows_of
from framework.errors import RunError
from framework.seed import mix
from framework.types import Batch, MapDataset


class Request(NamedTuple):
    """A batch to be loaded: `indices` of the dataset, int64, and the epoch it is for."""

    indices: Tensor
    epoch: int


class Fetch(Protocol):
    """Loads and collates the samples of a request, on the CPU."""

    def __call__(self, request: Request, /) -> Batch: ...


def fetch_for(dataset: MapDataset, *, part: str, seed: int) -> Fetch:
    """How to load batches of `dataset`: the short way where samples are rows of tensors."""
    rows = rows_of(dataset)
    return FetchSamples(dataset, part=part, seed=seed) if rows is None else FetchRows(rows, seed=seed)


def batch_key(seed: int, epoch: int) -> int:
    """What the random numbers of transforms of batches are keyed with."""
    return mix(seed, "batch", epoch)


@final
class FetchRows:
    """One indexing operation per tensor, instead of one `__getitem__` per sample and a collation."""

    def __init__(self, rows: Rows | Pieces, *, seed: int) -> None:
        self._rows = rows
        self._seed = seed

    def __call__(self, request: Request, /) -> Batch:
        rows, indices = self._rows, request.indices.to(self._rows.device)
        made = rows.transformed(rows.gather(indices), indices, key=batch_key(self._seed, request.epoch))
        return rows.pack(made)


@final
class FetchSamples:
    """`dataset[index]` for each index, then `default_collate`. The generators of the caller are left as they were.

    Raises RunError that names the sample where the dataset raises, or where samples can't be collated.
    """

    def __init__(self, dataset: MapDataset, *, part: str, seed: int) -> None:
        self._dataset = dataset
        self._part = part
        self._seed = seed

    def __call__(self, request: Request, /) -> Batch:
        indices = request.indices.tolist()
        with preserved_generators():
            samples = [self._load(index, epoch=request.epoch) for index in indices]
        return collated(samples, named=f"Samples {indices} of the {self._part} dataset")

    def _load(self, index: int, *, epoch: int) -> Any:
        seed_generators(mix(self._seed, "sample", epoch, index))
        return load_sample(self._dataset, index, part=self._part)


def collated(samples: list[Any], *, named: str) -> Batch:
    """A batch of samples. Raises RunError, where they can't be one, that calls them as `named`."""
    try:
        return default_collate(samples)
    except Exception as error:
        raise RunError(
            f"{named} don't make a batch: {type(error).__name__}: {error}\n"
            "Every sample must have the same structure, with tensors of the same shapes."
        ) from error


def load_sample(dataset: MapDataset, index: int, *, part: str) -> Any:
    """`dataset[index]`. Raises RunError that names the sample where the dataset raises."""
    try:
        return dataset[index]
    except Exception as error:
        raise RunError(
            f"Sample {index} of the {part} dataset raised {type(error).__name__}: {error}\n{where(error)}"
        ) from error


def seed_generators(seed: int) -> None:
    """Seed what a transform may draw from: Python's generator, torch's on the CPU, and NumPy's where it is loaded."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Put the generators that `seed_generators` seeds back afterwards."""
    python, pytorch = random.getstate(), torch.default_generator.get_state()
    numpy = sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        torch.default_generator.set_state(pytorch)
        if numpy is not None:
            numpy.random.set_state(state)


def where(error: BaseException) -> str:
    """The way through the dataset's code to where it raised: such an error is shown without its traceback."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is our own call
    return "\n".join(f"  {frame.filename}, line {frame.lineno}, in {frame.name}: {frame.line}" for frame in frames)
