"""Parse the composed mapping into the frozen `Config`, by the types and bounds of the schema's dataclasses.

All mistakes are collected and reported together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING
from typing import Any

from framework.config.hints import unknown_key_hint, wrong_value_hint
from framework.config.keys import Key, keys_of, known_keys, read_text
from framework.config.mistakes import raise_mistakes
from framework.config.nested import flatten, walk
from framework.config.overrides import normalize_override
from framework.config.renamed import with_present_names
from framework.config.schema import Config
from framework.config.values import WRONG, convert, is_dotted_name, is_within, show
from framework.errors import ConfigError

# What the command imports from here, beside the functions of this module.
__all__ = [
    "PACKAGE_LINE",
    "flatten",
    "normalize_override",
    "parse",
    "raise_mistakes",
    "read_text",
    "value_mistakes",
]

PACKAGE_LINE = "The first line of a recipe's file must be `# @package _global_`."

# OmegaConf's mark for a value that has to be given.
_MISSING = "???"


def parse(raw: Mapping[str, Any]) -> Config:
    """Return the configuration in `raw`: plain mappings, lists and scalars, with interpolations resolved.

    Raises ConfigError naming every unknown or missing key and every value of a wrong type or out of range.
    """
    raw = with_present_names(raw)
    if isinstance(raw.get("recipe"), Mapping):
        # The file's keys are all below `recipe`, so everything else would be missing, too.
        keys = ", ".join(str(key) for key in raw["recipe"]) or "it has none"
        raise ConfigError(f"The recipe's keys ({keys}) aren't where they belong. {PACKAGE_LINE}")
    reader = _Reader(raw)
    config = reader.read_section(Config, raw, path="")
    raise_mistakes(reader.mistakes)
    return config  # type: ignore[no-any-return]


def value_mistakes(raw: Mapping[str, Any]) -> list[str]:
    """Return what `parse` would report."""
    reader = _Reader(raw)
    reader.read_section(Config, raw, path="")
    return reader.mistakes


class _Reader:
    """Read a whole configuration and collect its mistakes."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._raw = raw
        self.mistakes: list[str] = []

    def read_section(self, section: type, raw: Any, *, path: str) -> Any:
        """Return an instance of the dataclass `section`, in which wrong values are WRONG."""
        values = {}
        for key in keys_of(section):
            values[key.name] = self._read_key(key, raw, dotted=f"{path}{key.name}")
        for name in raw:
            if name not in values:
                self._report_unknown(f"{path}{name}", raw[name], among=values, within=path.rstrip("."))
        return section(**values)

    def _read_key(self, key: Key, raw: Mapping[str, Any], *, dotted: str) -> Any:
        if key.name not in raw:
            return self._default(key, dotted=dotted)
        value = raw[key.name]
        if value == _MISSING:
            return self._wrong(f"{dotted} has no value. It must be {key.allowed}.")
        if key.nullable and value is None:
            return None
        if key.auto and value == "auto":
            return None
        if key.nullable and isinstance(value, str) and value.lower() == "none":
            return self._wrong(f"{dotted}={value}: this is a text. Type {dotted}=null")

        if key.section is not None:
            if not isinstance(value, Mapping):
                return self._wrong(f"{dotted}={show(value)}: must be {key.allowed}.")
            return self.read_section(key.section, value, path=f"{dotted}.")
        if key.takes_named_nodes:
            # `optimizer` takes one node, too.
            is_one_node = not isinstance(value, Mapping) or "_target_" in value
            if key.takes_node and is_one_node:
                return self._read_node(value, dotted=dotted)
            return self._read_named_nodes(key, value, dotted=dotted)
        if key.takes_node:
            return self._read_node(value, dotted=dotted)
        return self._read_scalar(key, value, dotted=dotted)

    def _default(self, key: Key, *, dotted: str) -> Any:
        """Return the default: a user's own file for a group, or a run of an earlier version, may lack newer keys."""
        if key.default is not MISSING:
            return key.default
        if key.nullable:
            return None
        return self._wrong(f"{dotted} is missing. It must be {key.allowed}.")

    def _read_named_nodes(self, key: Key, value: Any, *, dotted: str) -> Any:
        if not isinstance(value, Mapping):
            return self._wrong(f"{dotted}={show(value)}: must be {key.allowed}.")
        nodes = {}
        for name, node in value.items():
            # `callbacks.NAME=null` removes one.
            if node is not None:
                nodes[name] = self._read_node(node, dotted=f"{dotted}.{name}")
        return nodes

    def _read_node(self, node: Any, *, dotted: str) -> Any:
        if not isinstance(node, Mapping):
            hint = f" Write {dotted}: {{_target_: {node}}}" if is_dotted_name(node) else ""
            return self._wrong(f"{dotted}={show(node)}: must be a mapping with `_target_`.{hint}")
        if "_target_" not in node:
            return self._wrong(
                f"{dotted} has no `_target_`. Choose an option of its group, or give it one: "
                f"+{dotted}._target_=package.module.Name"
            )
        for where, value in walk(node, dotted):
            if value == _MISSING:
                self._wrong(f"{where} has no value. Set {where}=VALUE")
            elif where.endswith("._target_") and not is_dotted_name(value):
                self._wrong(f"{where}={show(value)}: must be a dotted name such as package.module.Name.")
        return node

    def _read_scalar(self, key: Key, value: Any, *, dotted: str) -> Any:
        for kind in key.kinds:
            result = convert(value, kind)
            if result is not WRONG:
                # The first type that takes the value decides.
                if is_within(result, key.bounds):
                    return result
                break
        hint = wrong_value_hint(key, value, dotted=dotted)
        return self._wrong(f"{dotted}={show(value)}: must be {key.allowed}.{hint}")

    def _report_unknown(self, dotted: str, value: Any, *, among: Iterable[str], within: str) -> None:
        shown = dotted if isinstance(value, Mapping) else f"{dotted}={show(value)}"
        hint = unknown_key_hint(dotted, value, known_keys(self._raw))
        if not hint:
            hint = f" {within or 'The configuration'} has {', '.join(among)}."
        self._wrong(f"{shown}: there is no such key.{hint}")

    def _wrong(self, mistake: str) -> Any:
        """Note a mistake; return what takes the value's place."""
        self.mistakes.append(mistake)
        return WRONG
