"""Load samples twice with the same key: whatever differs would not be reproduced by a resumed run either.

The same samples tell a resumed run if the data has changed. For that, floats and bytes (the pixels of an image) are
compared by their sums only, since libraries and processors decode and compute them slightly differently.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from framework.data.keyed_random import KeyedRandom
from framework.data.object_graph import attributes, unchanged
from framework.data.sample_random import Draws
from framework.data.tensor_samples import TensorSamples
from framework.distributed.seed import generator_states, mix, restore_generator_states
from framework.types import Collate, MapDataset

NUM_SAMPLES = 4
_NUM_ROWS = 64
"""The rows of tensors that a resumed run compares."""
_DEEPEST = 8
_TOLERANCE = 1e-3
_MOST_SUMS = 1024
_MOST_LEAVES = 10_000

_log = logging.getLogger("framework")


class CheckKey(NamedTuple):
    """The samples to load twice, in place of a batch."""

    indices: list[int]


@dataclass(frozen=True)
class Sketch:
    """A summary of some samples, in plain types."""

    # A checksum of what must be the same everywhere: structure, shapes, integers and strings.
    checksum: int
    # The sums of absolute values of each tensor of floats or bytes.
    sums: list[float]

    def is_near(self, other: Sketch) -> bool:
        """Return True if both may be of the same samples."""
        if self.checksum != other.checksum or len(self.sums) != len(other.sums):
            return False
        return all(
            math.isclose(own, others, rel_tol=_TOLERANCE) for own, others in zip(self.sums, other.sums, strict=True)
        )


@dataclass(frozen=True)
class CheckedSamples:
    """The result of loading samples twice."""

    # What differs, for a message; None: nothing.
    difference: str | None = None
    # None if they draw random numbers, or can't be loaded.
    sketch: Sketch | None = None


# Loading twice


def check_samples(
    dataset: MapDataset, indices: Sequence[int], *, collate_fn: Collate | None, random: KeyedRandom, seed: int
) -> CheckedSamples:
    """Load samples twice under one key each, and make a batch of them twice.

    Changes neither the dataset nor generators. random: the generators of dataset and collate function.
    """
    load = partial(_load, dataset, indices, collate_fn=collate_fn, random=random, seed=seed)
    try:
        with unchanged(dataset, collate_fn):
            first = load()
            # If loading created a generator, samples may have drawn from it before it was seeded.
            first = load() if random.find() else first
            second = load()
    except Exception as error:  # of the user's code; if the sample is needed, loading it says more
        _log.info("samples %s can't be compared: %s: %s", indices, type(error).__name__, error)
        return CheckedSamples()
    finally:
        random.find()
    for index, one, other in zip(indices, first.samples, second.samples, strict=True):
        path = _differing_path(one, other)
        if path is not None:
            return CheckedSamples(f"sample {index}{f', at {path},' if path else ''}")
    path = _differing_path(first.batch, second.batch)
    if path is not None:
        return CheckedSamples(f"the batch that its collate function makes{f', at {path}' if path else ''},")
    return CheckedSamples(sketch=None if first.draws else _sketch(first.samples))


class _Loaded(NamedTuple):
    samples: list[list[Leaf]]
    # The leaves of the batch that a collate function of the user's made.
    batch: list[Leaf]
    # The samples draw random numbers.
    draws: bool


def _load(
    dataset: MapDataset, indices: Sequence[int], *, collate_fn: Collate | None, random: KeyedRandom, seed: int
) -> _Loaded:
    samples: list[Any] = []
    leaves: list[list[Leaf]] = []
    draws = False
    with random.preserved():
        for index in indices:
            random.seed(mix(seed, "check", index))
            before = random.fingerprint()
            sample = dataset[index]
            draws = draws or random.fingerprint() != before
            if random.find_new():
                draws = True
                random.seed(mix(seed, "check", index))
                sample = dataset[index]
            samples.append(sample)
            # Before collating: a collate function may change samples in place.
            leaves.append(_leaves(samples[-1]))
        if collate_fn is None:
            return _Loaded(leaves, [], draws)
        random.seed(mix(seed, "check", "collate"))
        return _Loaded(leaves, _leaves(collate_fn(samples)), draws)


def check_rows(samples: TensorSamples, indices: Sequence[int], *, seed: int, device: torch.device) -> CheckedSamples:
    """Transform samples twice with the same draws on `device`. The rows themselves are compared by `sketch_rows`."""
    if samples.transform is None:
        return CheckedSamples()
    states = generator_states([device])
    random = KeyedRandom(samples.transform)
    try:
        with unchanged(samples.transform), random.preserved():
            first = _transformed(samples, indices, seed=seed, device=device)
            second = _transformed(samples, indices, seed=seed, device=device)
    except Exception as error:  # of the user's code; loading a batch says more
        _log.info("samples %s can't be compared: %s: %s", indices, type(error).__name__, error)
        return CheckedSamples()
    finally:
        restore_generator_states(states, devices=[device])
    is_same = _differing_path(first, second) is None
    return CheckedSamples(None if is_same else f"what its transform returns for samples {list(indices)}")


def _transformed(samples: TensorSamples, indices: Sequence[int], *, seed: int, device: torch.device) -> list[Leaf]:
    rows = samples.gather(torch.tensor(indices, device=samples.device))
    draws = Draws(partial(mix, seed, "check"), torch.arange(len(indices), device=device))
    return _leaves(samples.transformed([tensor.to(device) for tensor in rows], draws))


def sketch_rows(samples: TensorSamples) -> Sketch:
    """Return a sketch of some rows, evenly spread, before they are transformed."""
    number = min(len(samples), _NUM_ROWS)
    spread = torch.linspace(0, len(samples) - 1, number, dtype=torch.float64).round().long()
    checksum = 0
    sums: list[float] = []
    for tensor in samples.gather(spread.to(samples.device)):
        leaf = _of_tensor(tensor, "")
        checksum = zlib.crc32(str(leaf.checksum).encode(), checksum)
        if leaf.sum is not None:
            sums += _magnitude(tensor.flatten(start_dim=1) if tensor.ndim > 1 else tensor[:, None]).tolist()
    return Sketch(checksum, sums)


def _magnitude(rows: Tensor) -> Tensor:
    """Return the sum of absolute values of each row; those that aren't finite count 0."""
    return rows.detach().cpu().abs().double().nan_to_num(posinf=0.0).sum(dim=1)


def _sketch(samples: Sequence[Sequence[Leaf]]) -> Sketch:
    """Return a sketch of samples, each given as its leaves."""
    checksum = 0
    sums: list[float] = []
    for sample in samples:
        for leaf in sample:
            checksum = zlib.crc32(f"{leaf.path} {leaf.checksum}".encode(), checksum)
            if leaf.sum is not None:
                sums.append(leaf.sum)
    return Sketch(checksum, sums[:_MOST_SUMS])


def _differing_path(first: Sequence[Leaf], second: Sequence[Leaf]) -> str | None:
    """Return the path of the first leaf that differs; None if none does."""
    for one, other in zip(first, second, strict=False):
        if one.path != other.path or one.exact != other.exact:
            return one.path
    return None if len(first) == len(second) else ""


# What is in a sample


class Leaf(NamedTuple):
    """A value in a sample."""

    path: str
    # A checksum of its bytes or text.
    exact: int
    # A checksum of what must be the same on every machine.
    checksum: int
    # The sum of the absolute values of floats or bytes.
    sum: float | None


def _leaves(sample: Any) -> list[Leaf]:
    """Return the values in a sample; only the first ones of a very large sample."""
    return list(islice(_walk(sample), _MOST_LEAVES))


def _walk(sample: Any, path: str = "", depth: int = 0) -> Iterator[Leaf]:
    """Yield the values in tensors, arrays, images, containers and objects. Of unknown values, only the class counts."""
    if isinstance(sample, numpy.ndarray) and sample.dtype.kind in "fciub":
        sample = torch.from_numpy(numpy.ascontiguousarray(sample).copy())
    if isinstance(sample, Tensor):
        yield _of_tensor(sample, path)
    elif isinstance(sample, Mapping):
        for name, value in sample.items():
            yield from _walk(value, f"{path}[{name!r}]", depth)
    elif isinstance(sample, (list, tuple)):
        yield _of_text(f"{type(sample).__name__} {len(sample)}", path)
        for number, value in enumerate(sample):
            yield from _walk(value, f"{path}[{number}]", depth)
    elif isinstance(sample, float):
        yield Leaf(path, zlib.crc32(repr(sample).encode()), 0, abs(sample))
    elif sample is None or isinstance(sample, (str, bytes, int, numpy.generic)):
        yield _of_text(repr(sample), path)
    elif callable(getattr(sample, "tobytes", None)):
        # An image of PIL.
        pixels = numpy.frombuffer(sample.tobytes(), dtype=numpy.uint8).copy()
        yield _of_tensor(torch.from_numpy(pixels), path)
    else:
        yield _of_text(type(sample).__name__, path)
        if depth < _DEEPEST:
            for name, value in attributes(sample).items():
                yield from _walk(value, f"{path}.{name}", depth + 1)


def _of_text(text: str, path: str) -> Leaf:
    checksum = zlib.crc32(text.encode())
    return Leaf(path, checksum, checksum, None)


def _of_tensor(tensor: Tensor, path: str) -> Leaf:
    about = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return _of_text(about.decode(), path)
    values = tensor.detach().cpu().contiguous().flatten()
    if values.is_quantized or values.is_conj() or values.is_neg():
        values = values.dequantize() if values.is_quantized else values.resolve_conj().resolve_neg()
    raw = values.view(torch.uint8).numpy().tobytes() if values.numel() else b""
    exact = zlib.crc32(raw, zlib.crc32(about))
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.uint8:
        return Leaf(path, exact, zlib.crc32(about), float(_magnitude(values[None])))
    return Leaf(path, exact, exact, None)
