"""What to write instead of a key that doesn't exist, or of a value that isn't allowed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from framework.config.keys import Key, find_key, keys_of, named_keys
from framework.config.other_names import value_advice
from framework.config.schema import Config, Steps, Texts
from framework.config.suggest import did_you_mean, instead_of, nearest
from framework.config.values import show

# What others write for a truth value.
_TRUTH_VALUES = {"yes": "true", "on": "true", "1": "true", "no": "false", "off": "false", "0": "false"}


def unknown_key_hint(dotted: str, value: Any, keys: Iterable[str]) -> str:
    """Return, after a space, what to type for a key that doesn't exist; empty if unknown. keys: all that exist."""
    if dotted == "_target_":
        return " Indent it below its section, as in model: {_target_: package.module.Name}"
    section_name, _, name = dotted.rpartition(".")
    section = named_keys(Config).get(section_name)
    if name == "_target_" and section is not None and section.section is not None:
        nodes = [f"{section_name}.{key.name}" for key in keys_of(section.section) if key.takes_node]
        if nodes:
            return f" Type {nodes[0]}={{_target_:{show(value)}}}"
    around = find_key(section_name)
    if name == "_target_" and around is not None and around.takes_node:
        return f" Type {section_name}={{_target_:{show(value)}}}"
    typed = None
    if value is not None and not isinstance(value, Mapping):
        typed = show(value)
    return instead_of(dotted, typed, keys)


def wrong_value_hint(key: Key, value: Any, *, dotted: str) -> str:
    """Return, after a space, what to write instead of a value, if there is a likely answer; empty if there is none."""
    text = value_advice(dotted, show(value))
    if text is not None:
        return f" {text}"
    if isinstance(value, str) and key.read_text(value) != value:
        return " Here it is a text: write it without quotes."
    if Texts in key.kinds and isinstance(value, str) and value.strip():
        return f" Write {dotted}=[{value}]."
    if Steps in key.kinds and type(value) is int and value >= 1:
        return f" Write {dotted}=[{value}]."
    if int in key.kinds and type(value) is float and value.is_integer():
        return f" Write {dotted}={int(value)}."
    if key.kinds == [bool] and str(value).lower() in _TRUTH_VALUES:
        return f" Write {dotted}={_TRUTH_VALUES[str(value).lower()]}."
    if key.options:
        guess = nearest(show(value), key.options)
        if guess is None:
            return ""
        return did_you_mean(f"{dotted}={guess}")
    if str in key.kinds and isinstance(value, (int, float)):
        return f" Quote it: {dotted}=\"'{value}'\"."
    return ""
