"""Orders of many samples that are computed where they are read: a shuffled one, and the samples as they are.

`torch.randperm` of 2e8 samples takes a minute and 2 GB in every process, before the first batch.
"""

from __future__ import annotations

from typing import final

import numpy
import numpy.typing
import torch
from torch import Generator, Tensor

from framework.types import Order

_COMPUTED_FROM = 2**26
"""Samples. Smaller orders are tensors, and shuffled by `torch.randperm`, as those of earlier runs."""
_ROUNDS = 8

_Words = numpy.typing.NDArray[numpy.uint64]


def shuffled(size: int, generator: Generator) -> Order:
    """Return all of `size` samples in random order."""
    if size < _COMPUTED_FROM:
        return torch.randperm(size, generator=generator)
    return Permutation(size, generator)


def in_order(size: int) -> Order:
    """Return all of `size` samples as they are."""
    if size < _COMPUTED_FROM:
        return torch.arange(size)
    return _InOrder(size)


@final
class Permutation:
    """A pseudo-random permutation of range(size), of which any slice is computed at once and nothing is kept.

    A Feistel network (Luby and Rackoff, 1988) permutes the numbers of as many bits as `size` needs: each round changes
    one half of the bits by a keyed hash of the other half. Numbers that land outside of the range are permuted again
    until they don't ("cycle walking"; Black and Rogaway, 2002), on average once at most.

    Args:
        generator: Draws the keys of the rounds.
    """

    def __init__(self, size: int, generator: Generator) -> None:
        self._size = size
        # At least one bit in each half. They differ by one if the number of bits is odd.
        bits = max(2, (size - 1).bit_length())
        self._low_bits = numpy.uint64(bits // 2)
        self._low_mask = numpy.uint64((1 << bits // 2) - 1)
        self._high_mask = numpy.uint64((1 << (bits - bits // 2)) - 1)
        keys = torch.randint(1 << 62, (_ROUNDS,), generator=generator)
        self._keys: _Words = keys.numpy().astype(numpy.uint64)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, positions: slice) -> Tensor:
        """Return the indices at these positions: int64, on the CPU."""
        chosen = range(*positions.indices(self._size))
        numbers = self._permuted(numpy.arange(chosen.start, chosen.stop, chosen.step, dtype=numpy.uint64))
        (outside,) = numpy.nonzero(numbers >= self._size)
        while len(outside):
            walked = self._permuted(numbers[outside])
            numbers[outside] = walked
            outside = outside[walked >= self._size]
        return torch.from_numpy(numbers.view(numpy.int64))

    def _permuted(self, numbers: _Words) -> _Words:
        low = numbers & self._low_mask
        high = numbers >> self._low_bits
        for first_key, second_key in self._keys.reshape(-1, 2):
            high ^= _hashed(low, first_key) & self._high_mask
            low ^= _hashed(high, second_key) & self._low_mask
        return (high << self._low_bits) | low


def _hashed(numbers: _Words, key: numpy.uint64) -> _Words:
    """Return 64-bit hashes of numbers below 2**32, by the finalizer of SplitMix64 (Steele et al., 2014)."""
    # Multiplications are modulo 2**64.
    words = numbers ^ key
    words *= numpy.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> numpy.uint64(27)
    words *= numpy.uint64(0x94D049BB133111EB)
    words ^= words >> numpy.uint64(31)
    return words


@final
class _InOrder:
    """range(size), as int64 tensors of the slices that are read."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, positions: slice) -> Tensor:
        return torch.arange(*positions.indices(self._size))
