"""Nested mappings and lists, by dotted keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def walk(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of everything in mappings and lists, at every depth."""
    items: Iterable[tuple[Any, Any]]
    if isinstance(node, Mapping):
        items = node.items()
    elif isinstance(node, list):
        items = enumerate(node)
    else:
        return
    for name, value in items:
        key = f"{path}.{name}" if path else str(name)
        yield key, value
        yield from walk(value, key)


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a nested configuration by their dotted keys; a list is one value."""
    leaves: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            leaves |= flatten(value, f"{prefix}{name}.")
        else:
            leaves[f"{prefix}{name}"] = value
    return leaves


def is_equal(one: Any, other: Any) -> bool:
    """Return True if two values of a configuration are equal. Unlike for ==, NaN equals itself."""
    return bool(one == other) or repr(one) == repr(other)
