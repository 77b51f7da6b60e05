"""Random numbers of samples and collate functions that depend on a key, such as (seed, epoch, position), alone.

A dataset draws from the generators of Python, NumPy and torch, and from generators of its own: in its attributes, or in
those of its transforms or collate function. All of them are seeded by the key before a sample is loaded.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import numpy
import torch

from framework.data.object_graph import is_generator, reachable
from framework.distributed.seed import fingerprint, mix, preserved_generators, seed_generators


@final
class KeyedRandom:
    """The generators that the roots, a dataset and its collate function, draw from."""

    def __init__(self, *roots: Any) -> None:
        self._roots = roots
        self._own: list[Any] = []
        self.find()

    def find(self) -> bool:
        """Look for generators of the roots' own; return True if there are other ones than before.

        A dataset may make one when it loads its first sample, or a new one in every epoch.
        """
        found = [each for each in reachable(*self._roots) if is_generator(each)]
        is_changed = [id(each) for each in found] != [id(each) for each in self._own]
        self._own = found
        return is_changed

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore all generators afterwards: they may be used elsewhere in this process."""
        states = [_state(generator) for generator in self._own]
        generators = list(self._own)
        with preserved_generators():
            try:
                yield
            finally:
                for generator, state in zip(generators, states, strict=True):
                    _restore(generator, state)

    def fingerprint(self) -> tuple[object, ...]:
        """Return a value that any draw changes."""
        return (*fingerprint(()), *(pickle.dumps(_state(generator)) for generator in self._own))

    def seed(self, key: int) -> None:
        """Seed all generators by a number below 2**63; each draws numbers of its own."""
        seed_generators(key)
        for number, generator in enumerate(self._own):
            _seed(generator, mix(key, "own generator", number))


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, random.Random):
        generator.seed(seed)
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, numpy.random.RandomState):
        generator.seed(seed & 0xFFFFFFFF)
    else:
        bits = generator.bit_generator
        bits.state = type(bits)(seed).state


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, (torch.Generator, numpy.random.RandomState)):
        return generator.get_state()
    return generator.bit_generator.state


def _restore(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, (torch.Generator, numpy.random.RandomState)):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state
