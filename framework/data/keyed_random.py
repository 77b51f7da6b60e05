"""Make the random numbers of samples and collate functions depend on a key alone: (seed, epoch, position).

A dataset draws from the generators of Python, NumPy and torch, and from generators of its own: in its attributes, or in
those of its transforms or collate function. All of them are seeded by the key before a sample is loaded.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from types import FunctionType
from typing import Any, TypeVar, final

import numpy
import torch

from framework.data.object_graph import attributes, is_generator, is_leaf, search
from framework.distributed.seed import fingerprint, mix, preserved_generators, seed_generators

_T = TypeVar("_T")

_MOST_WATCHED = 64
"""Objects whose attributes are looked at after each sample."""
_MOST_VALUES = 100
"""The attributes of an object that is watched, at most."""
_MOST_SEARCHES = 16
"""Searches of new objects, at most 20 ms each. A new generator that is itself an attribute is always noticed."""


@final
class KeyedRandom:
    """The generators that the roots, a dataset and its collate function, draw from."""

    def __init__(self, *roots: Any) -> None:
        self._roots = roots
        self._generators: list[Any] = []
        # The path to each, by which it is seeded: generators that are created later don't change its numbers.
        self._paths: list[str] = []
        self._watched: list[_Attributes] = []
        self._searches_left = _MOST_SEARCHES
        self.find()

    def find(self) -> bool:
        """Search the roots for generators; return True if they aren't those of the last search.

        A dataset may create one when it loads its first sample, or a new one in every epoch.
        """
        reached = search(*self._roots)
        numbers = [number for number, part in enumerate(reached.objects) if is_generator(part)]
        generators = [reached.objects[number] for number in numbers]
        is_changed = list(map(id, generators)) != list(map(id, self._generators))
        self._generators = generators
        self._paths = [reached.path(number) for number in numbers]
        self._watched = list(islice(_watched(reached.objects), _MOST_WATCHED))
        return is_changed

    def find_new(self) -> bool:
        """Search again if an attribute of a watched object has a new value; return True if there are new generators.

        Takes about a microsecond for a dataset with ten attributes.
        """
        objects = []
        for attributes_of_one in self._watched:
            objects += attributes_of_one.new_objects()
        if not objects:
            return False
        if any(map(is_generator, objects)):
            return self.find()
        if self._searches_left == 0:
            return False
        # Otherwise an attribute that gets a new object with every sample would cost a search per sample.
        self._searches_left -= 1
        return self.find()

    def load_seeded(self, load: Callable[[], _T], *, key: int | None = None, searches_all: bool = False) -> _T:
        """Return what `load` returns if all generators were seeded, also those that loading has created.

        `load` may have drawn from a new generator before that was known and seeded. So it is called again then.

        Args:
            load: loads a sample or a batch.
            key: seeds the generators before each call; None: `load` seeds them itself.
            searches_all: look for new generators everywhere, not only in attributes that have changed.
        """
        if key is not None:
            self.seed(key)
        value = load()
        has_new_generators = self.find() if searches_all else self.find_new()
        if not has_new_generators:
            return value
        if key is not None:
            self.seed(key)
        return load()

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore all generators afterwards: they may be used elsewhere in this process."""
        generators = list(self._generators)
        states = [_state(generator) for generator in generators]
        with preserved_generators():
            try:
                yield
            finally:
                for generator, state in zip(generators, states, strict=True):
                    _restore(generator, state)

    def fingerprint(self) -> tuple[object, ...]:
        """Return a value that changes with every draw."""
        states = [pickle.dumps(_state(generator)) for generator in self._generators]
        return (*fingerprint(()), *states)

    def seed(self, key: int) -> None:
        """Seed all generators by a number below 2**63; each draws numbers of its own."""
        seed_generators(key)
        for path, generator in zip(self._paths, self._generators, strict=True):
            _seed(generator, mix(key, "own generator", path))


@final
class _Attributes:
    """The attributes of an object, or the values of a dict, in which a generator may appear later."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values
        self._ids = {name: id(value) for name, value in values.items()}

    def new_objects(self) -> list[Any]:
        """Return the values that were added or replaced; numbers, text and tensors are ignored."""
        new = []
        # A copy, since a thread of the dataset may add attributes meanwhile.
        for name, value in list(self._values.items()):
            if self._ids.get(name) != id(value) and not is_leaf(value):
                new.append(value)
        return new


def _watched(objects: Iterable[Any]) -> Iterator[_Attributes]:
    for part in objects:
        if isinstance(part, dict) and len(part) <= _MOST_VALUES:
            yield _Attributes(part)
        has_attributes = type(part).__dictoffset__ != 0 and not isinstance(part, (FunctionType, type))
        if has_attributes and len(attributes(part)) <= _MOST_VALUES:
            yield _Attributes(attributes(part))


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
