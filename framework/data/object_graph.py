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
    found = Reached([], [])
    seen: set[int] = set()
    waiting: deque[tuple[Any, tuple[int, object]]] = deque((root, (-1, number)) for number, root in enumerate(roots))
    nested: deque[tuple[Any, tuple[int, object]]] = deque()
    while (waiting or nested) and len(found.objects) < _MOST_OBJECTS:
        each, origin = waiting.popleft() if waiting else nested.popleft()
        if id(each) in seen or is_leaf(each):
            continue
        # This reference keeps other objects from getting its id.
        found.objects.append(each)
        found.origins.append(origin)
        seen.add(id(each))
        if is_generator(each):
            continue
        number = len(found.objects) - 1
        is_container = type(each) in _CONTAINERS
        for name, part in _parts(each):
            is_nested = is_container and type(part) in _CONTAINERS
            (nested if is_nested else waiting).append((part, (number, name)))
    return found


def is_leaf(each: Any) -> bool:
    """Return True for a value that holds nothing of interest, such as a number or a tensor."""
    return issubclass(type(each), _LEAVES)


def is_generator(each: Any) -> bool:
    """Return True for a random generator that can be seeded."""
    kind = type(each)
    return issubclass(kind, GENERATORS) and not issubclass(kind, random.SystemRandom)


def attributes(each: Any) -> dict[str, Any]:
    """Return the object's own `__dict__`; an empty one if it has none."""
    try:
        found = object.__getattribute__(each, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


@contextmanager
def unchanged(*roots: Any) -> Iterator[None]:
    """Restore the attributes, lists and dicts of all that the roots hold, such as counters and opened files.

    Other changes in place, as to an array, remain.
    """
    objects = reachable(*roots)
    holders = [attributes(each) for each in objects]
    holders += [each for each in objects if isinstance(each, dict) and len(each) <= _MOST_ELEMENTS]
    lists = [each for each in objects if isinstance(each, list) and len(each) <= _MOST_ELEMENTS]
    dicts_before = [dict(holder) for holder in holders]
    lists_before = [list(each) for each in lists]
    try:
        yield
    finally:
        for holder, before in zip(holders, dicts_before, strict=True):
            if list(map(id, holder.values())) != list(map(id, before.values())):
                holder.clear()
                holder.update(before)
        for each, elements in zip(lists, lists_before, strict=True):
            if list(map(id, each)) != list(map(id, elements)):
                each[:] = elements


def _parts(each: Any) -> Iterator[tuple[object, Any]]:
    """Yield what an object refers to directly, each with a name."""
    kind = type(each)
    if issubclass(kind, type):
        yield from _parts_of_class(each)
        return
    if issubclass(kind, CellType):
        yield from _content(each)
        return
    if issubclass(kind, FunctionType):
        yield from _parts_of_function(each)
    elif issubclass(kind, MethodType):
        yield "__self__", each.__self__
        yield "__func__", each.__func__
    elif issubclass(kind, BuiltinFunctionType):
        # Also a bound method of a class in C, such as `random.Random(0).random`.
        yield "__self__", each.__self__
    elif issubclass(kind, functools.partial):
        yield "func", each.func
        yield "args", each.args
        yield "keywords", each.keywords
    elif issubclass(kind, (staticmethod, classmethod)):
        yield "__func__", each.__func__
    elif issubclass(kind, property):
        yield "fget", each.fget
    elif issubclass(kind, dict):
        for number, (key, value) in enumerate(islice(dict.items(each), _MOST_ELEMENTS)):
            yield ("key", key if isinstance(key, (str, int)) else number), value
    elif issubclass(kind, (list, tuple, deque)):
        yield from enumerate(islice(each, _MOST_ELEMENTS))
    yield from islice(attributes(each).items(), _MOST_ELEMENTS)
    yield from _slots(each)
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
    except ValueError:  # nothing was assigned yet
        return ()


def _slots(each: Any) -> Iterator[tuple[object, Any]]:
    """Yield the attributes in `__slots__`."""
    for kind in type(each).__mro__:
        if kind.__module__.partition(".")[0] in _WITHOUT_USER_CODE:
            continue
        members: Mapping[str, Any] = vars(kind)
        for member in members.values():
            if isinstance(member, MemberDescriptorType):
                try:
                    yield member.__name__, member.__get__(each)
                except AttributeError:  # not set
                    continue
