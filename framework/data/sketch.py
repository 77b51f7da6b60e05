"""Summarise samples in a few numbers, to tell whether data has changed.

Floats and bytes (the pixels of an image) are compared by their sums only, since libraries and processors decode and
compute them slightly differently. Everything else is compared exactly.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from framework.data.object_graph import attributes
from framework.data.tensor_samples import TensorSamples

_NUM_ROWS = 64
"""The rows of tensors that a resumed run compares."""
_TOLERANCE = 1e-3
_DEEPEST = 8
_MOST_SUMS = 1024
_MOST_LEAVES = 10_000


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
        pairs = zip(self.sums, other.sums, strict=True)
        return all(math.isclose(one, other, rel_tol=_TOLERANCE) for one, other in pairs)


def sketch_samples(samples: Sequence[Sequence[Leaf]]) -> Sketch:
    """Return a sketch of samples, each given as its leaves."""
    checksum = 0
    sums: list[float] = []
    for sample in samples:
        for leaf in sample:
            checksum = zlib.crc32(f"{leaf.path} {leaf.checksum}".encode(), checksum)
            if leaf.sum is not None:
                sums.append(leaf.sum)
    return Sketch(checksum, sums[:_MOST_SUMS])


def sketch_rows(samples: TensorSamples) -> Sketch:
    """Return a sketch of some rows, evenly spread, before they are transformed."""
    number = min(len(samples), _NUM_ROWS)
    spread = torch.linspace(0, len(samples) - 1, number, dtype=torch.float64).round().long()
    checksum = 0
    sums: list[float] = []
    for tensor in samples.gather(spread.to(samples.device)):
        leaf = _leaf_of_tensor(tensor, "")
        checksum = zlib.crc32(str(leaf.checksum).encode(), checksum)
        if leaf.sum is not None:
            rows = tensor[:, None] if tensor.ndim == 1 else tensor.flatten(start_dim=1)
            sums += _magnitudes(rows).tolist()
    return Sketch(checksum, sums)


# The values in a sample


class Leaf(NamedTuple):
    """A value in a sample."""

    path: str
    # A checksum of its bytes or text.
    exact: int
    # A checksum of what must be the same on every machine.
    checksum: int
    # The sum of the absolute values of floats or bytes.
    sum: float | None


def leaves_of(sample: Any) -> list[Leaf]:
    """Return the values in a sample; only the first ones of a very large sample."""
    return list(islice(_walk(sample), _MOST_LEAVES))


def differing_path(first: Sequence[Leaf], second: Sequence[Leaf]) -> str | None:
    """Return the path of the first leaf that differs; None if none does."""
    for one, other in zip(first, second, strict=False):
        if one.path != other.path or one.exact != other.exact:
            return one.path
    return None if len(first) == len(second) else ""


def _walk(sample: Any, path: str = "", depth: int = 0) -> Iterator[Leaf]:
    """Yield the values in tensors, arrays, images, containers and objects. Of unknown values, only the class counts."""
    if isinstance(sample, numpy.ndarray) and sample.dtype.kind in "fciub":
        sample = torch.from_numpy(numpy.ascontiguousarray(sample).copy())

    if isinstance(sample, Tensor):
        yield _leaf_of_tensor(sample, path)
    elif isinstance(sample, Mapping):
        for name, value in sample.items():
            yield from _walk(value, f"{path}[{name!r}]", depth)
    elif isinstance(sample, (list, tuple)):
        yield _leaf_of_text(f"{type(sample).__name__} {len(sample)}", path)
        for number, value in enumerate(sample):
            yield from _walk(value, f"{path}[{number}]", depth)
    elif isinstance(sample, float):
        yield Leaf(path, zlib.crc32(repr(sample).encode()), 0, abs(sample))
    elif sample is None or isinstance(sample, (str, bytes, int, numpy.generic)):
        yield _leaf_of_text(repr(sample), path)
    elif callable(getattr(sample, "tobytes", None)):
        # An image of PIL.
        pixels = numpy.frombuffer(sample.tobytes(), dtype=numpy.uint8).copy()
        yield _leaf_of_tensor(torch.from_numpy(pixels), path)
    else:
        yield _leaf_of_text(type(sample).__name__, path)
        if depth < _DEEPEST:
            for name, value in attributes(sample).items():
                yield from _walk(value, f"{path}.{name}", depth + 1)


def _leaf_of_text(text: str, path: str) -> Leaf:
    checksum = zlib.crc32(text.encode())
    return Leaf(path, checksum, checksum, None)


def _leaf_of_tensor(tensor: Tensor, path: str) -> Leaf:
    about = f"{tensor.dtype} {tuple(tensor.shape)}"
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return _leaf_of_text(about, path)

    # A copy: a tensor with a single element counts as contiguous with any stride, and has no bytes to view then.
    values = tensor.detach().cpu().flatten().clone(memory_format=torch.contiguous_format)
    if values.is_quantized:
        values = values.dequantize()
    else:
        values = values.resolve_conj().resolve_neg()
    content = values.view(torch.uint8).numpy().tobytes() if values.numel() else b""

    checksum = zlib.crc32(about.encode())
    exact = zlib.crc32(content, checksum)
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.uint8:
        return Leaf(path, exact, checksum, float(_magnitudes(values[None])))
    return Leaf(path, exact, exact, None)


def _magnitudes(rows: Tensor) -> Tensor:
    """Return the sum of absolute values of each row; those that aren't finite count 0."""
    return rows.detach().cpu().abs().double().nan_to_num(posinf=0.0).sum(dim=1)
