"""Overrides as they are typed: `key=value`."""

from __future__ import annotations

import re
from typing import Any

from framework.config.keys import Key, named_keys
from framework.config.schema import Config, Texts


def normalize_override(override: str) -> str:
    """Return an override as Hydra takes it, by what the schema says of its key.

    - A section with a `shorthand` gets its value there: `preflight=true` is `preflight.enabled=true`.
    - A value of a list needs no brackets there: `runs=a` is `runs.paths=[a]`.
    - A `verbatim` text is quoted: `runs.filter=val/loss<1`.
    - Keys of a mapping that is the user's may be new: `args.number=2` is `++args.number=2`.
    """
    match = re.fullmatch(r"(\+*)(\w+)(\.[^=]*)?=(.*)", override, re.DOTALL)
    if match is None:
        return override
    plus, section_name, below, value = match.groups(default="")
    section = named_keys(Config).get(section_name)
    if section is None:
        return override
    if section.kinds == [dict[str, Any]]:
        return f"++{section_name}{below}={value}"

    keys: dict[str, Key] = {}
    if section.section is not None:
        keys = named_keys(section.section)
    if not below and section.shorthand is not None and not value.lstrip().startswith("{"):
        below = f".{section.shorthand}"
        if keys[section.shorthand].kinds == [Texts]:
            value = _as_list(value)
    key = keys.get(below.removeprefix("."))
    if key is not None and key.verbatim:
        value = _as_quoted(value)
    return f"{plus}{section_name}{below}={value}"


def _as_list(value: str) -> str:
    if not value or value == "null" or value.lstrip().startswith("["):
        return value
    return f"[{value}]"


def _as_quoted(value: str) -> str:
    if not value or value == "null" or value.startswith(("'", '"')):
        return value
    return f"'{value}'"
