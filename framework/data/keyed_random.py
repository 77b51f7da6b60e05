"""Make the random numbers of samples and collate functions depend on a key alone: (seed, epoch, position).

A dataset draws from the generators of Python, NumPy and torch, and from generators of its own: in its attributes, or in
those of its transforms or collate function. All of them are seeded by the key before a sample is loaded.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from types import FunctionType
from typing import Any, final

import numpy
import torch

from framework.data.object_graph import attributes, is_generator, is_leaf, search
from framework.distributed.seed import fingerprint, mix, preserved_generators, seed_generators

_MOST_WATCHED = 64
"""Objects whose attributes are looked at after each sample."""
_MOST_VALUES = 100
_MOST_SEARCHES = 16
"""Of new objects, at most 20 ms each. A new generator that is itself an attribute is always noticed."""


@final
class KeyedRandom:
    """The generators that the roots, a dataset and its collate function, draw from."""

    def __init__(self, *roots: Any) -> None:
        self._roots = roots
        self._own: list[Any] = []
        # The path to each, by which it is seeded: generators that are created later don't change its numbers.
        self._names: list[str] = []
        self._watched: list[_Attributes] = []
        self._searches_left = _MOST_SEARCHES
        self.find()

    def find(self) -> bool:
        """Search the roots for generators; return True if they aren't those of the last search.

        A dataset may create one when it loads its first sample, or a new one in every epoch.
        """
        reached = search(*self._roots)
        numbers = [number for number, each in enumerate(reached.objects) if is_generator(each)]
        found = [reached.objects[number] for number in numbers]
        is_changed = [id(each) for each in found] != [id(each) for each in self._own]
        self._own = found
        self._names = [reached.path(number) for number in numbers]
        self._watched = list(islice(_watched(reached.objects), _MOST_WATCHED))
        return is_changed

    def find_new(self) -> bool:
        """Search again if an attribute of a watched object has a new value; return True if there are new generators.

        Takes about a microsecond for a dataset with ten attributes.
        """
        objects = [value for each in self._watched for value in each.new_objects()]
        if not objects:
            return False
        if any(map(is_generator, objects)):
            return self.find()
        if self._searches_left == 0:
            return False
        # Otherwise an attribute that gets a new object with every sample would cost a search per sample.
        self._searches_left -= 1
        return self.find()

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
        """Return a value that changes with every draw."""
        return (*fingerprint(()), *(pickle.dumps(_state(generator)) for generator in self._own))

    def seed(self, key: int) -> None:
        """Seed all generators by a number below 2**63; each draws numbers of its own."""
        seed_generators(key)
        for name, generator in zip(self._names, self._own, strict=True):
            _seed(generator, mix(key, "own generator", name))


@final
class _Attributes:
    """The attributes of an object, or the values of a dict, in which a generator may appear later."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values
        self._ids = {name: id(value) for name, value in values.items()}

    def new_objects(self) -> list[Any]:
        """Return the values that were added or replaced; numbers, text and tensors are ignored."""
        # A copy, since a thread of the dataset may add attributes meanwhile.
        items = list(self._values.items())
        return [value for name, value in items if self._ids.get(name) != id(value) and not is_leaf(value)]


def _watched(objects: Iterable[Any]) -> Iterator[_Attributes]:
    for each in objects:
        if isinstance(each, dict) and len(each) <= _MOST_VALUES:
            yield _Attributes(each)
        has_attributes = type(each).__dictoffset__ != 0 and not isinstance(each, (FunctionType, type))
        if has_attributes and len(attributes(each)) <= _MOST_VALUES:
            yield _Attributes(attributes(each))


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
