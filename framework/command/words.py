"""The words of a command line, put together as they were meant, where spaces or dashes have split an override."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from framework.config.saved import key_of

_NO_DASHES = "a key is written without dashes, as KEY=VALUE."
_NO_SPACES = "there are no spaces around `=`."
_NO_SPACES_INSIDE = "a list or mapping has no spaces, or quotes around it."
NOT_OF_FORM = "not of the form key=value."


class Phrase(NamedTuple):
    """Words that were meant as one override."""

    # As typed, with spaces between the words.
    text: str
    # The override; a single word if it is unknown what was meant.
    override: str
    # Why `text` isn't an override; empty if it is one.
    mistake: str = ""


def is_override(word: str) -> bool:
    """Return True for a word that is an override, right or wrong: `key=value` or `~key`."""
    key, equals, _ = word.partition("=")
    return not key.startswith("-") and (bool(key and equals) or key.startswith("~"))


def phrases(words: Sequence[str], *, keys: Collection[str]) -> Iterator[Phrase]:
    """Yield the overrides that the words were meant as, in their order. keys: words that a value may follow."""
    rest = list(words)
    while rest:
        taken, phrase = _first_phrase(rest, keys=keys)
        yield phrase
        del rest[:taken]


def _first_phrase(words: Sequence[str], *, keys: Collection[str]) -> tuple[int, Phrase]:
    """Return the number of words of the first phrase, and the phrase."""
    first = words[0]
    following = words[1] if len(words) > 1 else ""
    key = first.lstrip("-")

    # `[early_stopping, ema]`
    if is_override(first) and _is_open(first):
        for taken in range(2, len(words) + 1):
            if not _is_open(" ".join(words[:taken])):
                text = " ".join(words[:taken])
                return taken, Phrase(text, _without_spaces(text), _NO_SPACES_INSIDE)

    # `key = value`, `key =value`, `key= value`
    taken = 1
    if "=" not in first and following.startswith("="):
        taken = 2
    if words[taken - 1].endswith("=") and len(words) > taken and _is_value(words[taken]):
        taken += 1
    if taken > 1:
        return taken, Phrase(" ".join(words[:taken]), "".join(words[:taken]).lstrip("-"), _NO_SPACES)

    # `key: value`
    if first.endswith(":") and _is_value(following):
        return 2, Phrase(f"{first} {following}", f"{first.rstrip(':')}={following}", NOT_OF_FORM)
    if is_override(first):
        return 1, Phrase(first, first)
    if not first.startswith("-"):
        if first in keys and _is_value(following):
            return 2, Phrase(f"{first} {following}", f"{first}={following}", NOT_OF_FORM)
        return 1, Phrase(first, first, NOT_OF_FORM)
    if "=" in first:
        return 1, Phrase(first, key, _NO_DASHES)
    if _is_value(following):
        return 2, Phrase(f"{first} {following}", f"{key}={following}", _NO_DASHES)
    return 1, Phrase(first, f"{key}=true", _NO_DASHES)


def _without_spaces(text: str) -> str:
    """Return a list or mapping as one word, with commas between its items."""
    return re.sub(r"\s+", ",", re.sub(r"\s*([,:\[\]{}])\s*", r"\1", text))


def _is_value(word: str) -> bool:
    """Return True for a word that is neither an override nor a flag. Negative numbers are values."""
    is_flag = word.startswith("-") and not word[1:2].isdigit()
    return bool(word) and "=" not in word and not is_flag and not word.startswith("~")


def _is_open(text: str) -> bool:
    """Return True if a bracket isn't closed."""
    return text.count("[") > text.count("]") or text.count("{") > text.count("}")


def is_of_sweeps(override: str) -> bool:
    """Return True for an override that says how a sweep is run, not what a trial is."""
    return key_of(override).partition(".")[0] == "sweep"


def is_of_submission(override: str) -> bool:
    """Return True for an override that says how a command is submitted, and not what the job does then."""
    return key_of(override).partition(".")[0] in ("job", "submit", "format")
