"""Overrides as they are typed: `key=value`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from framework.config.keys import Key, named_keys
from framework.config.schema import Config, Texts


def normalize_override(override: str) -> str:
    """Return an override as Hydra takes it, by what the schema says of its key.

    - A section with a `shorthand` gets its value there: `preflight=true` is `preflight.enabled=true`.
    - A value of a list needs no brackets there: `runs=a` is `runs.paths=[a]`.
    - A `verbatim` text is quoted: `runs.filter=val/loss<1`.
    - Keys of a mapping that is the user's may be new: `args.number=2` is `++args.number=2`, and
      `submit.slurm.partition=gpu` is `++submit.slurm.partition=gpu`.
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
    below_name = below.removeprefix(".")
    first = keys.get(below_name.partition(".")[0])
    if first is not None and first.kinds == [dict[str, Any]]:
        plus = "++"
    key = keys.get(below_name)
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


def key_of(override: str) -> str:
    """Return the key or group of an override: `trainer.gpus` for `+trainer.gpus=2`."""
    return override.lstrip("+~").partition("=")[0]


def dotted_key(override: str) -> str:
    """Return the key that an override sets, also if it chooses an option of a group such as `optimizer@x=sgd`."""
    return key_of(override).partition("@")[0].replace("/", ".")


def merge_overrides(saved: Sequence[str], typed: Sequence[str]) -> list[str]:
    """Return the overrides of a resumed run: those typed for the original run, then those typed now.

    A key typed now replaces the earlier one; choosing another option of a group drops what was typed for the old one.
    """
    replaced: set[str] = set()
    for text in typed:
        value = text.partition("=")[2]
        # A mapping is merged into what is there (`optimizer={lr:0.1}`), anything else replaces it.
        if not value.lstrip().startswith("{"):
            replaced.add(key_of(text))
    # `optimizer=sgd` replaces `optimizer.lr=0.1`, too; a key with a dot is no group.
    groups = {key for key in replaced if "." not in key}

    merged: list[str] = []
    for text in saved:
        key = key_of(text)
        if key not in replaced and key.partition(".")[0] not in groups:
            merged.append(text)
    return [*merged, *typed]


def quoted(text: str) -> str:
    """Return a text in quotes, as Hydra's overrides have it."""
    # A backslash means itself, except before a quote, the closing one included.
    escaped = re.sub(r"(\\+)(?='|\Z)", r"\1\1", text).replace("'", "\\'")
    return f"'{escaped}'"


def search_path_override(places: Sequence[str]) -> str:
    """Return the override that makes Hydra look for options in these places, too."""
    return "hydra.searchpath=[" + ",".join(quoted(place) for place in places) + "]"


def resume_argument(path: str | Path) -> str:
    """Return `resume=PATH`, quoted for the shell and for Hydra."""
    return path_argument("resume", path)


def path_argument(key: str, path: str | Path) -> str:
    """Return `key=PATH`, quoted for the shell and for Hydra."""
    return shlex.quote(f"{key}={path_value(path)}")


def path_value(path: str | Path) -> str:
    """Return a path as the value of an override, in quotes if it may mean something else to Hydra."""
    value = str(path)
    if not re.fullmatch(r"(\w+:/)?[\w./-]*/[\w./-]*", value, flags=re.ASCII):
        value = quoted(value)
    return value


def outputs_arguments(overrides: Sequence[str]) -> list[str]:
    """Return the typed `path.outputs`, quoted for the shell: a command that names a run needs it, since only below it
    is a run the user's.
    """
    return [shlex.quote(text) for text in overrides if key_of(text) in ("path", "path.outputs")]
