"""Which tests are run by default: all but those that are marked `exhaustive`, which have another one in their place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import pytest

MARKER = "exhaustive"
Collected = dict[str, dict[str, list[bool]]]
"""File → name of the test function → for each of its variants, whether it is marked."""
COLLECTED = pytest.StashKey[Collected]()


def collected(items: Iterable[pytest.Item]) -> Collected:
    """What there is to choose from."""
    found: Collected = defaultdict(lambda: defaultdict(list))
    for item in items:
        file, _, name = item.nodeid.partition("::")
        found[file][name.partition("[")[0]].append(_is_marked(item))
    return {file: dict(functions) for file, functions in found.items()}


def is_left_out(item: pytest.Item, *, named: Sequence[str]) -> bool:
    """Whether it is marked and none of the arguments `named`, as `tests/test_a.py::test_b[c]`, is its name."""
    _, _, name = item.nodeid.partition("::")
    wanted = (argument.partition("::")[2] for argument in named if "::" in argument)
    return _is_marked(item) and not any(name == each or name.startswith((f"{each}[", f"{each}::")) for each in wanted)


def without_another(found: Mapping[str, Mapping[str, Sequence[bool]]]) -> list[str]:
    """The files and test functions that are left out as a whole though nothing near them stands for them.

    A file may not be marked as a whole. A function that is needs another one in its file that isn't marked at all.
    """
    faults = []
    for file, functions in found.items():
        whole = [name for name, marked in functions.items() if all(marked)]
        if whole and all(any(marked) for marked in functions.values()):
            faults += [f"{file}::{name}" for name in whole]
    return faults


def _is_marked(item: pytest.Item) -> bool:
    return item.get_closest_marker(MARKER) is not None
