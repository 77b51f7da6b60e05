"""What a dataset, its transforms and its collate function hold, such as random generators of their own.

Objects are reached through attributes, elements of containers, closures, `functools.partial` and bound methods. No code
of theirs is run: properties and `__getattr__` aren't called.
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
from typing import Any

import numpy
import torch
from torch import Tensor

_MOST_OBJECTS = 20_000
"""Looked at: about 20 ms. A dataset may hold a list of millions of file names."""
_MOST_ELEMENTS = 1_000
"""Of each container."""

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
"""Packages whose methods draw from no generator of their module. Looking for one would cost 25 ms for `datasets`."""


GENERATORS = (random.Random, numpy.random.Generator, numpy.random.RandomState, torch.Generator)


def reachable(*roots: Any) -> list[Any]:
    """Return what the roots hold, and themselves, each once and the nearest first.

    The order is the same in every process. Of large containers only the first elements are looked at.
    """
    found: list[Any] = []
    seen: set[int] = set()
    waiting = deque(roots)
    while waiting and len(found) < _MOST_OBJECTS:
        each = waiting.popleft()
        if id(each) in seen or issubclass(type(each), _LEAVES):
            continue
        # Kept, so that no other object gets its id.
        found.append(each)
        seen.add(id(each))
        if not is_generator(each):
            waiting.extend(_parts(each))
    return found


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
    """Restore the attributes, lists and dicts of what the roots hold: counters, and files that were opened.

    What is changed in place otherwise, such as an array, stays changed.
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


def _parts(each: Any) -> Iterator[Any]:
    """Yield what an object refers to directly."""
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
        yield from (each.__self__, each.__func__)
    elif issubclass(kind, BuiltinFunctionType):
        # Also a bound method of a class in C, such as `random.Random(0).random`.
        yield each.__self__
    elif issubclass(kind, functools.partial):
        yield from (each.func, each.args, each.keywords)
    elif issubclass(kind, (staticmethod, classmethod)):
        yield each.__func__
    elif issubclass(kind, property):
        yield each.fget
    elif issubclass(kind, dict):
        yield from islice(dict.values(each), _MOST_ELEMENTS)
    elif issubclass(kind, (list, tuple, deque)):
        yield from islice(each, _MOST_ELEMENTS)
    yield from islice(attributes(each).values(), _MOST_ELEMENTS)
    yield from _slots(each)
    yield kind


def _parts_of_class(kind: type) -> Iterator[Any]:
    """Yield the attributes and methods of a class, and its bases."""
    if kind.__module__.partition(".")[0] not in _WITHOUT_USER_CODE:
        yield from islice(vars(kind).values(), _MOST_ELEMENTS)
        yield from kind.__bases__


def _parts_of_function(function: FunctionType) -> Iterator[Any]:
    """Yield what a function holds, and of its module the generators and functions that it names."""
    yield from function.__closure__ or ()
    yield function.__defaults__
    yield function.__kwdefaults__
    for name in names_in(function.__code__):
        value = function.__globals__.get(name)
        is_neighbour = isinstance(value, FunctionType) and value.__module__ == function.__module__
        if is_neighbour or is_generator(value):
            yield value


def names_in(code: CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in a function, and in functions and comprehensions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


def _content(cell: CellType) -> Iterable[Any]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # nothing was assigned yet
        return ()


def _slots(each: Any) -> Iterator[Any]:
    """Yield the values of the attributes in `__slots__`."""
    for kind in type(each).__mro__:
        if kind.__module__.partition(".")[0] in _WITHOUT_USER_CODE:
            continue
        members: Mapping[str, Any] = vars(kind)
        for member in members.values():
            if isinstance(member, MemberDescriptorType):
                try:
                    yield member.__get__(each)
                except AttributeError:  # not set
                    continue
