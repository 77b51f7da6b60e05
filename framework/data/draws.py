"""Random numbers for each sample of a batch, which depend on (seed, epoch, position) and on nothing else.

The position is that of the sample in the epoch's order: a sample that comes twice in an epoch gets other numbers.

A counter-based generator: number k of a sample is a hash of its key and k, so a batch of them is a few vectorised
operations on the device of the batch, and rank, device and the other samples of the batch change nothing.

SplitMix64, from G. Steele, D. Lea and C. Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014, with the
constants of https://prng.di.unimi.it/splitmix64.c. 64-bit arithmetic wraps in torch as it does in C.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

_MASK = (1 << 64) - 1


def _signed(value: int) -> int:
    """Return the int64 with the bits of an unsigned number."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)
_LARGEST_RANGE = 1 << 31


@final
class Draws:
    """The random numbers of a batch of B samples. Each call continues each sample's sequence.

    Args:
        key: Called at the first draw; returns a number below 2**63 that stands for seed and epoch.
        position_B: int64, on the device that the numbers are wanted on.
    """

    def __init__(self, key: Callable[[], int], position_B: Tensor) -> None:
        self._key = key
        self._position_B = position_B
        self._streams_B: Tensor | None = None
        self._used = 0

    def __len__(self) -> int:
        return len(self._position_B)

    def uniform(self, n: int) -> Tensor:
        """Return (B, n) numbers in [0, 1), float32: multiples of 2**-24."""
        # Exact on every device.
        return _shifted(self._bits(n), 40).to(torch.float32) * 2.0**-24

    def normal(self, n: int) -> Tensor:
        """Return (B, n) numbers of mean 0 and variance 1, normally distributed, float32."""
        # Box and Muller's method takes equally many uniform numbers for every sample. 1 - uniform is never 0.
        radius = (-2 * (1 - self.uniform(n)).log()).sqrt()
        angle = 2 * math.pi * self.uniform(n)
        return radius * angle.cos()

    def integers(self, low: int, high: int, n: int) -> Tensor:
        """Return (B, n) integers from `low` to `high` - 1, int64. Raises ValueError for an empty range.

        Some are more likely than others by less than a part in 2**32 / (high - low).
        """
        if not 0 < high - low <= _LARGEST_RANGE:
            raise ValueError(f"draws.integers({low}, {high}): high must be above low, by at most {_LARGEST_RANGE}.")
        # Lemire's multiplication in place of a remainder: https://arxiv.org/abs/1805.10941
        return _shifted(_shifted(self._bits(n), 32) * (high - low), 32) + low

    def _bits(self, n: int) -> Tensor:
        """Return (B, n) hashes of the next counters."""
        if self._streams_B is None:
            self._streams_B = _mixed((self._position_B + 1) * _GAMMA + _signed(self._key()))
        counters = torch.arange(self._used + 1, self._used + n + 1, device=self._position_B.device)
        self._used += n
        return _mixed(self._streams_B.unsqueeze(1) + counters * _GAMMA)


def _mixed(bits: Tensor) -> Tensor:
    bits = (bits ^ _shifted(bits, 30)) * _FIRST
    bits = (bits ^ _shifted(bits, 27)) * _SECOND
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Shift to the right, filling with zeros: torch's `>>` fills with the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)
