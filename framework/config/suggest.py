"""Suggest the nearest valid name for a mistyped one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches

_CUTOFF = 0.6
_CUTOFF_ELSEWHERE = 0.8  # for a name in another section than the one that was given


def nearest(given: str, allowed: Iterable[str]) -> str | None:
    """Return the name in `allowed` that is most like `given`, or None if none is similar."""
    by_folded = {name.casefold(): name for name in allowed}
    matches = get_close_matches(given.casefold(), by_folded, n=1, cutoff=_CUTOFF)
    if matches:
        return by_folded[matches[0]]
    longer = [name for folded, name in by_folded.items() if len(given) > 1 and given.casefold() in folded]
    return min(longer, key=len, default=None)


def nearest_key(given: str, allowed: Iterable[str]) -> str | None:
    """Return the full dotted key that is most like `given`, in any section; None if none is similar.

    `trainer.gpsu`, `optimizer_lr` and `gpus` find `trainer.gpus`, `optimizer.lr` and `trainer.gpus`.
    """
    allowed = list(allowed)
    has_section = given.rpartition(".")[0] in allowed
    # Not the sections above it: the mistake is in the rest of the name.
    scored = [
        (_likeness(given, key, has_section=has_section), -len(key), key)
        for key in allowed
        if not given.startswith(f"{key}.")
    ]
    best = max(scored, default=None)
    return best[2] if best is not None and best[0] >= _CUTOFF else None


def did_you_mean(name: str | None) -> str:
    """Return ` Did you mean name?`, to append to a sentence; empty if there is no name."""
    return "" if name is None else f" Did you mean {name}?"


def _likeness(given: str, key: str, *, has_section: bool) -> float:
    if given == key:
        return 2.0
    section, _, name = given.casefold().rpartition(".")
    key_section, _, key_name = key.casefold().rpartition(".")
    of_name = _ratio(name, key_name)
    # `epochs` for `max_epochs`, `prec` for `precision`
    if len(name) > 1 and (name in key_name.split("_") or key_name.startswith(name)):
        of_name = max(of_name, _CUTOFF_ELSEWHERE)
    if section == key_section:  # a right section says nothing about the name below it
        return of_name
    if has_section and of_name < _CUTOFF_ELSEWHERE:
        return 0.0
    of_all = _ratio(given.casefold().replace(".", "_"), key.casefold().replace(".", "_"))
    if name == key_name:  # the right name in the wrong place; `of_all` decides between several of them
        return 0.85 + 0.1 * of_all
    return max(of_all, 0.9 * of_name)


def _ratio(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other, autojunk=False).ratio()
