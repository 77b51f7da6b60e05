"""A saved configuration with what is typed for it now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from framework.config.overrides import dotted_key

_NOT_THERE = object()


def apply_typed(
    saved: Mapping[str, Any], *, before: Mapping[str, Any], after: Mapping[str, Any], typed: Sequence[str]
) -> dict[str, Any]:
    """Return the saved configuration with the keys and groups of `typed` as they are in `after`, and what follows.

    Args:
        before: The configuration composed without `typed`.
        after: The configuration composed with `typed`. All that differs from `before` follows from `typed`, as
            `data.datasets.root` follows from `data.root`.
    """
    # A typed key is taken out of `before`, so that it counts as a difference even if today's default is typed.
    without_typed = deepcopy(dict(before))
    for text in typed:
        if text.startswith("~"):
            continue
        names = dotted_key(text).split(".")
        section = without_typed
        while len(names) > 1 and isinstance(section.get(names[0]), dict):
            section = section[names.pop(0)]
        section.pop(names[0], None)
    return _apply_changes(saved, before=without_typed, after=after)


def _apply_changes(target: Mapping[str, Any], *, before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return `target` with every difference between `before` and `after`."""
    result = dict(target)
    for key in before.keys() | after.keys():
        old = before.get(key, _NOT_THERE)
        new = after.get(key, _NOT_THERE)
        if isinstance(old, Mapping) and isinstance(new, Mapping) and isinstance(result.get(key), Mapping):
            result[key] = _apply_changes(result[key], before=old, after=new)
        elif new is _NOT_THERE:
            result.pop(key, None)
        elif old != new:
            result[key] = deepcopy(new)
    return result
