"""Find what a dataset, its transforms and its collate function hold, such as random generators.

Objects are reached through attributes, elements of containers, closures, `functools.partial` and bound methods. None of
their code is run: properties and `__getattr__` aren't called.
"""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    NoneType,
)
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

_MOST_OBJECTS = 20_000
"""The limit of a search, which takes about 20 ms: a dataset may hold a list of millions of file names."""
_MOST_ELEMENTS = 1_000
"""The elements of each container that are visited."""

_LEAVES = (
    NoneType,
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    bytearray,
    range,
    Tensor,
    numpy.ndarray,
    numpy.generic,
    ModuleType,
    CodeType,
)
_WITHOUT_USER_CODE = {
    "PIL",
    "abc",
    "builtins",
    "collections",
    "datasets",
    "enum",
    "functools",
    "numpy",
    "pathlib",
    "torch",
    "torchvision",
    "transformers",
    "typing",
}
"""Packages without generators in their modules. Searching `datasets` for one would take 25 ms."""

_CONTAINERS = (dict, list, tuple)

GENERATORS = (random.Random, numpy.random.Generator, numpy.random.RandomState, torch.Generator)


class Reached(NamedTuple):
    """Objects, and where each was found first."""

    objects: list[Any]
    # The number of the holder among the objects, -1 for none, and the name that the object has there.
    origins: list[tuple[int, object]]

    def path(self, number: int) -> str:
        """Return the names that lead from a root to object `number`. New attributes don't change them."""
        names = []
        while number >= 0:
            number, name = self.origins[number]
            names.append(repr(name))
        return " ".join(reversed(names))


def reachable(*roots: Any) -> list[Any]:
    """Return the roots and all that they hold, each once, nearest first, in the same order in every process."""
    return search(*roots).objects


def search(*roots: Any) -> Reached:
    """Find all that the roots hold; see `reachable`.

    Only the first elements of a large container are visited. Containers in containers, which hold data such as
    annotations, come last.
    """
    reached = Reached([], [])
    seen: set[int] = set()
    # Objects to visit, each with its origin.
    waiting: deque[tuple[Any, tuple[int, object]]] = deque()
    waiting_in_containers: deque[tuple[Any, tuple[int, object]]] = deque()
    for number, root in enumerate(roots):
        waiting.append((root, (-1, number)))

    while (waiting or waiting_in_containers) and len(reached.objects) < _MOST_OBJECTS:
        part, origin = waiting.popleft() if waiting else waiting_in_containers.popleft()
        if id(part) in seen or is_leaf(part):
            continue
        # This reference keeps other objects from getting its id.
        reached.objects.append(part)
        reached.origins.append(origin)
        seen.add(id(part))
        if is_generator(part):
            continue

        number = len(reached.objects) - 1
        is_container = type(part) in _CONTAINERS
        for name, inner in _parts(part):
            if is_container and type(inner) in _CONTAINERS:
                waiting_in_containers.append((inner, (number, name)))
            else:
                waiting.append((inner, (number, name)))
    return reached


def is_leaf(value: Any) -> bool:
    """Return True for a value that holds nothing of interest, such as a number or a tensor."""
    return issubclass(type(value), _LEAVES)


def is_generator(value: Any) -> bool:
    """Return True for a random generator that can be seeded."""
    kind = type(value)
    return issubclass(kind, GENERATORS) and not issubclass(kind, random.SystemRandom)


def attributes(holder: Any) -> dict[str, Any]:
    """Return the object's own `__dict__`; an empty one if it has none."""
    try:
        values = object.__getattribute__(holder, "__dict__")
    except AttributeError:
        return {}
    return values if isinstance(values, dict) else {}


@contextmanager
def unchanged(*roots: Any) -> Iterator[None]:
    """Restore the attributes, lists and dicts of all that the roots hold, such as counters and opened files.

    Other changes in place, as to an array, remain.
    """
    # Dicts include the attributes of objects.
    dicts: list[dict[Any, Any]] = []
    lists: list[list[Any]] = []
    for part in reachable(*roots):
        dicts.append(attributes(part))
        if isinstance(part, dict) and len(part) <= _MOST_ELEMENTS:
            dicts.append(part)
        if isinstance(part, list) and len(part) <= _MOST_ELEMENTS:
            lists.append(part)
    dicts_before = [dict(values) for values in dicts]
    lists_before = [list(elements) for elements in lists]
    try:
        yield
    finally:
        for values, values_before in zip(dicts, dicts_before, strict=True):
            if not _has_same_objects(values.values(), values_before.values()):
                values.clear()
                values.update(values_before)
        for elements, elements_before in zip(lists, lists_before, strict=True):
            if not _has_same_objects(elements, elements_before):
                elements[:] = elements_before


def _has_same_objects(values: Iterable[Any], others: Iterable[Any]) -> bool:
    return list(map(id, values)) == list(map(id, others))


def _parts(holder: Any) -> Iterator[tuple[object, Any]]:
    """Yield what an object refers to directly, each with a name."""
    kind = type(holder)
    if issubclass(kind, type):
        yield from _parts_of_class(holder)
        return
    if issubclass(kind, CellType):
        yield from _content(holder)
        return
    if issubclass(kind, FunctionType):
        yield from _parts_of_function(holder)
    elif issubclass(kind, MethodType):
        yield "__self__", holder.__self__
        yield "__func__", holder.__func__
    elif issubclass(kind, BuiltinFunctionType):
        # Also a bound method of a class in C, such as `random.Random(0).random`.
        yield "__self__", holder.__self__
    elif issubclass(kind, functools.partial):
        yield "func", holder.func
        yield "args", holder.args
        yield "keywords", holder.keywords
    elif issubclass(kind, (staticmethod, classmethod)):
        yield "__func__", holder.__func__
    elif issubclass(kind, property):
        yield "fget", holder.fget
    elif issubclass(kind, dict):
        for number, (key, value) in enumerate(islice(dict.items(holder), _MOST_ELEMENTS)):
            yield ("key", key if isinstance(key, (str, int)) else number), value
    elif issubclass(kind, (list, tuple, deque)):
        yield from enumerate(islice(holder, _MOST_ELEMENTS))
    yield from islice(attributes(holder).items(), _MOST_ELEMENTS)
    yield from _slots(holder)
    yield "__class__", kind


def _parts_of_class(kind: type) -> Iterator[tuple[object, Any]]:
    """Yield the attributes and methods of a class, and its bases."""
    if kind.__module__.partition(".")[0] not in _WITHOUT_USER_CODE:
        yield from islice(vars(kind).items(), _MOST_ELEMENTS)
        yield from enumerate(kind.__bases__)


def _parts_of_function(function: FunctionType) -> Iterator[tuple[object, Any]]:
    """Yield what a function holds, and the generators and functions of its module that it uses."""
    yield from enumerate(function.__closure__ or ())
    yield "__defaults__", function.__defaults__
    yield "__kwdefaults__", function.__kwdefaults__
    for name in names_in(function.__code__):
        value = function.__globals__.get(name)
        is_neighbour = isinstance(value, FunctionType) and value.__module__ == function.__module__
        if is_neighbour or is_generator(value):
            yield name, value


def names_in(code: CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in a function, and in functions and comprehensions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


def _content(cell: CellType) -> Iterable[tuple[object, Any]]:
    try:
        return (("cell_contents", cell.cell_contents),)
    except ValueError:
        # Nothing was assigned yet.
        return ()


def _slots(holder: Any) -> Iterator[tuple[object, Any]]:
    """Yield the attributes in `__slots__`."""
    for kind in type(holder).__mro__:
        if kind.__module__.partition(".")[0] in _WITHOUT_USER_CODE:
            continue
        members: Mapping[str, Any] = vars(kind)
        for member in members.values():
            if isinstance(member, MemberDescriptorType):
                try:
                    yield member.__name__, member.__get__(holder)
                except AttributeError:
                    # It is not set.
                    continue
