"""Suggest the nearest valid name for a mistyped one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches

from framework.config.other_names import advice

_CUTOFF = 0.6
"""Names that are less alike, from 0 to 1, aren't suggested."""

_CUTOFF_ELSEWHERE = 0.8
"""The same for a name in another section than the one that was given."""


def nearest(wrong: str, allowed: Iterable[str]) -> str | None:
    """Return the name in `allowed` that is most like `wrong`, or None if none is similar."""
    by_folded: dict[str, list[str]] = {}
    for name in allowed:
        by_folded.setdefault(name.casefold(), []).append(name)
    folded = wrong.casefold()
    matches = get_close_matches(folded, by_folded, n=1, cutoff=_CUTOFF)
    if matches:
        # For `SDG` the class `SGD`, not the module `sgd`.
        return max(by_folded[matches[0]], key=lambda name: SequenceMatcher(None, wrong, name).ratio())
    if len(wrong) < 2:
        return None
    # `steps` isn't like `steps_per_trial`, letter by letter, but a part of it.
    longer = [names[0] for name, names in by_folded.items() if folded in name]
    return min(longer, key=len, default=None)


def nearest_key(wrong: str, allowed: Iterable[str]) -> str | None:
    """Return the full dotted key that is most like `wrong`, in any section; None if none is similar.

    `trainer.gpsu`, `optimizer_lr` and `gpus` find `trainer.gpus`, `optimizer.lr` and `trainer.gpus`.
    """
    keys = list(allowed)
    has_section = wrong.rpartition(".")[0] in keys
    scores: list[tuple[float, int, str]] = []
    for key in keys:
        # Not the sections above it: the mistake is in the rest of the name.
        if not wrong.startswith(f"{key}."):
            # Of two keys that are as much alike, the shorter one wins.
            scores.append((_likeness(wrong, key, has_section=has_section), -len(key), key))
    if not scores:
        return None
    likeness, _, key = max(scores)
    if likeness < _CUTOFF:
        return None
    return key


def instead_of(key: str, value: str | None, allowed: Iterable[str]) -> str:
    """Return a sentence, after a space, with what to type for a `key=value` whose key doesn't exist; empty if unknown.

    value: as it was typed; None for a key that has none, such as a whole section.
    """
    text = advice(key, value or "")
    if text is not None:
        return f" {text}"
    guess = nearest_key(key, allowed)
    if guess is not None and value is not None:
        guess = f"{guess}={value}"
    return did_you_mean(guess)


def did_you_mean(name: str | None) -> str:
    """Return ` Did you mean name?`, to append to a sentence; empty if there is no name."""
    if name is None:
        return ""
    return f" Did you mean {name}?"


def _likeness(wrong: str, key: str, *, has_section: bool) -> float:
    """Return how much alike two keys are; above 1 if they are the same.

    has_section: the section of `wrong` exists, so that its name is probably the mistake.
    """
    if wrong == key:
        return 2.0
    section, _, name = wrong.casefold().rpartition(".")
    key_section, _, key_name = key.casefold().rpartition(".")
    of_name = _ratio(name, key_name)
    # `epochs` for `max_epochs`, `prec` for `precision`
    if len(name) > 1 and (name in key_name.split("_") or key_name.startswith(name)):
        of_name = max(of_name, _CUTOFF_ELSEWHERE)
    # A right section says nothing about the name below it.
    if section == key_section:
        return of_name
    if has_section and of_name < _CUTOFF_ELSEWHERE:
        return 0.0
    of_all = _ratio(wrong.casefold().replace(".", "_"), key.casefold().replace(".", "_"))
    # The right name in the wrong place; `of_all` decides between several of them.
    if name == key_name:
        return 0.85 + 0.1 * of_all
    return max(of_all, 0.9 * of_name)


def _ratio(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other, autojunk=False).ratio()
