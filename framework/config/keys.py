"""The keys of the configuration: what the schema's dataclasses say of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from framework.config.jobs import JOBS
from framework.config.nested import walk
from framework.config.schema import Config, Duration, FunctionName, JobName, Node, Steps, Texts
from framework.config.values import WRONG, convert, number_or_bool


class Key:
    """One key, as described by the type hint and metadata of a dataclass field."""

    def __init__(self, field: Field[Any], hint: Any) -> None:
        kinds = get_args(hint) if get_origin(hint) in (UnionType, Union) else (hint,)
        self.name = field.name
        # `dataclasses.MISSING` if it has none.
        self.default = field.default
        if field.default_factory is not MISSING:
            self.default = field.default_factory()
        self.auto = "auto" in field.metadata
        # The key of the section that is set by `SECTION=VALUE`, if there is one.
        self.shorthand: str | None = field.metadata.get("shorthand")
        # True: what is typed is a text, whatever characters it has.
        self.verbatim = "verbatim" in field.metadata
        self.nullable = NoneType in kinds
        # at_least, above, at_most.
        self.bounds: Mapping[str, float] = field.metadata.get("bounds", {})
        # A dataclass, or types that the schema lists.
        self.kinds = [kind for kind in kinds if kind is not NoneType]
        # The dataclass below this key, if it has one.
        self.section: Any = kinds[0] if is_dataclass(kinds[0]) else None
        # The names that are allowed, if it takes one of several.
        self.options: list[str] = []
        for kind in kinds:
            if get_origin(kind) is Literal:
                self.options += get_args(kind)
        if JobName in kinds:
            self.options = list(JOBS)

    @property
    def takes_node(self) -> bool:
        """It is one object of the user's, as the model is."""
        return Node in self.kinds

    @property
    def takes_named_nodes(self) -> bool:
        """It is several objects of the user's by name, as callbacks and loggers are."""
        return dict[str, Node] in self.kinds

    def read_text(self, text: str) -> Any:
        """Return a text that stands for a number or a truth value, if only these are allowed, as one; else the text."""
        values = [text, number_or_bool(text)]
        for value in values:
            if any(convert(value, kind) is not WRONG for kind in self.kinds):
                return value
        return text

    @property
    def allowed(self) -> str:
        """Describe the allowed values, for messages."""
        if self.section is not None:
            names = ", ".join(key.name for key in keys_of(self.section))
            return f"a mapping with the keys {names}"
        limits = " and ".join(f"{word.replace('_', ' ')} {bound}" for word, bound in self.bounds.items())
        described: dict[Any, str] = {
            bool: "true or false",
            int: "a whole number" if float in self.kinds else f"a whole number {limits}".rstrip(),
            float: f"{'a fraction' if int in self.kinds else 'a number'} {limits}".rstrip(),
            str: "text",
            Duration: "a time such as 90s, 30m, 2h or 1d, or a number of seconds; above 0 and at most 365d",
            Texts: "a list of strings such as [one,two]",
            Steps: "a list of steps such as [120,121], counted from 1",
            Node: "a mapping with `_target_`",
            dict[str, Any]: "a mapping",
            FunctionName: "the dotted name of a function",
            JobName: f"one of {', '.join(JOBS)} or the dotted name of a function",
            dict[str, Node]: "a mapping from names to mappings with `_target_`",
            dict[str, str]: "a mapping from text to text",
        }
        options = ", ".join(self.options)
        if len(self.options) > 1:
            options = f"one of {options}"
        ways = [" or ".join(described.get(kind, options) for kind in self.kinds)]
        if self.auto:
            ways.append("auto")
        if self.nullable:
            ways.append("null")
        return ", or ".join(ways)


@cache
def keys_of(section: type) -> list[Key]:
    """Return the keys of a section, one of the schema's dataclasses."""
    hints = get_type_hints(section)
    return [Key(field, hints[field.name]) for field in fields(section)]


def named_keys(section: type) -> dict[str, Key]:
    """Return the keys of a section by name."""
    return {key.name: key for key in keys_of(section)}


def find_key(dotted: str) -> Key | None:
    """Return the key of a dotted name such as `trainer.gpus`; None if the schema has none."""
    section: Any = Config
    key = None
    for name in dotted.split("."):
        if section is None:
            return None
        key = named_keys(section).get(name)
        if key is None:
            return None
        section = key.section
    return key


# Questions about keys


def known_keys(raw: Mapping[str, Any] | None = None) -> list[str]:
    """Return every dotted key that the framework reads, sections included, and those inside the nodes of `raw`."""
    return list(_dotted_keys(Config, raw, path=""))


def _dotted_keys(section: type, raw: Any, *, path: str) -> Iterator[str]:
    """Yield the dotted keys of a section, and those inside the nodes of `raw`."""
    for key in keys_of(section):
        dotted = f"{path}{key.name}"
        yield dotted
        value = raw.get(key.name) if isinstance(raw, Mapping) else None
        if key.section is not None:
            yield from _dotted_keys(key.section, value, path=f"{dotted}.")
        elif key.takes_node or key.takes_named_nodes:
            for inner, _ in walk(value, dotted):
                yield inner


def listed_values(dotted: str) -> list[str]:
    """Return the values of a key that the schema lists by name, for completion; none if it lists none."""
    key = find_key(dotted)
    if key is None:
        return []
    values = list(key.options)
    if bool in key.kinds:
        values += ["true", "false"]
    if values and key.auto:
        values.append("auto")
    if values and key.nullable:
        values.append("null")
    return values


def is_section(name: str) -> bool:
    """Return True if the keys below a key of the top are the schema's, as those of `trainer` are."""
    key = named_keys(Config).get(name)
    return key is not None and key.section is not None


def takes_several(group: str) -> bool:
    """Return True if several options of a group can be chosen: those of callbacks and loggers have names."""
    key = named_keys(Config).get(group)
    return key is not None and key.kinds == [dict[str, Node]]


def takes_node(group: str) -> bool:
    """Return True if a group is one object of the user's, as the model is."""
    key = named_keys(Config).get(group)
    return key is not None and key.takes_node


def read_text(dotted: str, text: str) -> Any:
    """Return a text at a dotted key of the schema as the number or truth value that it stands for, if it must be one.

    Environment variables, which a file has by `${oc.env:SEED}`, are texts.
    """
    key = find_key(dotted)
    return text if key is None else key.read_text(text)
