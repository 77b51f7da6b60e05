"""The nearest valid name for one that was mistyped. Pure, and called only once something is wrong."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches

_CUTOFF = 0.6
_CUTOFF_ELSEWHERE = 0.8  # for a name in another section than the one that was given


def nearest(given: str, allowed: Iterable[str]) -> str | None:
    """The name among `allowed` most like `given`, or None where nothing is like it."""
    by_folded = {name.casefold(): name for name in allowed}
    matches = get_close_matches(given.casefold(), by_folded, n=1, cutoff=_CUTOFF)
    if matches:
        return by_folded[matches[0]]
    longer = [name for folded, name in by_folded.items() if len(given) > 1 and given.casefold() in folded]
    return min(longer, key=len, default=None)


def nearest_key(given: str, allowed: Iterable[str]) -> str | None:
    """The full dotted key most like `given`, wherever it lies in the tree.

    `trainer.gpsu`, `optimizer_lr` and `gpus` find `trainer.gpus`, `optimizer.lr` and `trainer.gpus`.
    """
    allowed = list(allowed)
    parent = given.rpartition(".")[0]
    # Not the keys above it: what is wrong lies below them.
    scored = [
        (key == given, _likeness(given, key), -len(key), key)
        for key in allowed
        if not given.startswith(f"{key}.") and (parent not in allowed or _may_be_moved(given, key))
    ]
    best = max(scored, default=None)
    return best[3] if best is not None and (best[0] or best[1] >= _CUTOFF) else None


def _may_be_moved(given: str, key: str) -> bool:
    """Whether `key` is in the same section as `given`, or has nearly the same name in another section."""
    parent, _, last = given.rpartition(".")
    key_parent, _, key_last = key.rpartition(".")
    last, key_last = _fold(last), _fold(key_last)
    return key_parent == parent or last in key_last.split("_") or _ratio(last, key_last) >= _CUTOFF_ELSEWHERE


def did_you_mean(name: str | None) -> str:
    """` Did you mean name?`, to put behind a sentence; empty where there is no name."""
    return "" if name is None else f" Did you mean {name}?"


def _likeness(given: str, key: str) -> float:
    given_parent, _, given_last = given.rpartition(".")
    key_parent, _, key_last = key.rpartition(".")
    given_last, key_last = _fold(given_last), _fold(key_last)
    last = _ratio(given_last, key_last)
    # `epochs` for `max_epochs`, `prec` for `precision`
    if len(given_last) > 1 and (given_last in key_last.split("_") or key_last.startswith(given_last)):
        last = max(last, 0.7)
    whole = _ratio(_fold(given), _fold(key))
    if given_last == key_last:  # the right name in the wrong place; `whole` decides between several of them
        return max(whole, 0.85 + 0.1 * whole)
    # A parent that is right says nothing about the name below it.
    return last if given_parent and given_parent == key_parent else max(whole, 0.9 * last)


def _fold(name: str) -> str:
    return name.casefold().replace(".", "_").replace("-", "_").replace("/", "_")


def _ratio(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other, autojunk=False).ratio()
