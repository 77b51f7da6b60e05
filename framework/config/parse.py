"""Parse the composed mapping into the frozen `Config`, by the types and bounds of the schema's dataclasses.

All mistakes are collected and reported together.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from framework.config.jobs import JOBS
from framework.config.other_names import value_advice
from framework.config.renamed import with_present_names
from framework.config.schema import Config, Duration, FunctionName, JobName, Node, Texts
from framework.config.suggest import did_you_mean, instead_of, nearest
from framework.errors import ConfigError

PACKAGE_LINE = "The first line of a recipe's file must be `# @package _global_`."

_UNIT_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
# Beyond a year, the clocks of torch and of the system overflow.
_MAX_DURATION_S = 365 * 86400
# Characters of a wrong value in a message.
_MAX_SHOWN = 60
# OmegaConf's mark for a value that has to be given.
_MISSING = "???"
# What others write for a truth value.
_TRUTH_VALUES = {"yes": "true", "on": "true", "1": "true", "no": "false", "off": "false", "0": "false"}
# Stands for a value that has been reported as wrong.
_WRONG: Any = object()


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


def raise_mistakes(mistakes: list[str]) -> None:
    """Raise one ConfigError that lists all of `mistakes`; do nothing if there are none."""
    if mistakes:
        raise ConfigError(as_text(mistakes))


def as_text(mistakes: Sequence[str]) -> str:
    """Return a message with all of `mistakes`, of which there is at least one."""
    if len(mistakes) == 1:
        return mistakes[0]
    lines = [f"The configuration has {len(mistakes)} mistakes:"]
    for mistake in mistakes:
        lines.append("  - " + mistake.replace("\n", "\n    "))
    return "\n".join(lines)


def known_keys(raw: Mapping[str, Any] | None = None) -> list[str]:
    """Return every dotted key that the framework reads, sections included, and those inside the nodes of `raw`."""
    return list(_keys(Config, raw, path=""))


def listed_values(key: str) -> list[str]:
    """Return the values of a key that the schema lists by name, for completion; none if it lists none."""
    *parents, name = key.split(".")
    section: Any = Config
    for parent in parents:
        field = _named_fields(section).get(parent)
        if field is None or field.section is None:
            return []
        section = field.section

    field = _named_fields(section).get(name)
    if field is None:
        return []
    values = list(field.options)
    if bool in field.kinds:
        values += ["true", "false"]
    if values and field.auto:
        values.append("auto")
    if values and field.nullable:
        values.append("null")
    return values


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
    plus, section, below, value = match.groups(default="")
    field = _named_fields(Config).get(section)
    if field is None:
        return override
    if field.kinds == [dict[str, Any]]:
        return f"++{section}{below}={value}"

    keys: dict[str, _Field] = {}
    if field.section is not None:
        keys = _named_fields(field.section)
    if not below and field.shorthand is not None and not value.lstrip().startswith("{"):
        below = f".{field.shorthand}"
        if keys[field.shorthand].kinds == [Texts]:
            value = _as_list(value)
    key = keys.get(below.removeprefix("."))
    if key is not None and key.verbatim:
        value = _as_quoted(value)
    return f"{plus}{section}{below}={value}"


def _as_list(value: str) -> str:
    if not value or value == "null" or value.lstrip().startswith("["):
        return value
    return f"[{value}]"


def _as_quoted(value: str) -> str:
    if not value or value == "null" or value.startswith(("'", '"')):
        return value
    return f"'{value}'"


def is_section(key: str) -> bool:
    """Return True if the keys below a key are the schema's, as those of `trainer` are."""
    field = _named_fields(Config).get(key)
    return field is not None and field.section is not None


def takes_several(group: str) -> bool:
    """Return True if several options of a group can be chosen: those of callbacks and loggers have names."""
    field = _named_fields(Config).get(group)
    return field is not None and field.kinds == [dict[str, Node]]


def takes_node(group: str) -> bool:
    """Return True if a group is one object of the user's, as the model is."""
    field = _named_fields(Config).get(group)
    return field is not None and Node in field.kinds


def unknown_key_hint(key: str, value: Any, keys: Iterable[str]) -> str:
    """Return, after a space, what to type for a key that doesn't exist; empty if unknown. keys: all that exist."""
    if key == "_target_":
        return " Indent it below its section, as in model: {_target_: package.module.Name}"
    section, _, name = key.rpartition(".")
    field = _named_fields(Config).get(section)
    if name == "_target_" and field is not None and field.section is not None:
        nodes = [f"{section}.{below.name}" for below in _fields_of(field.section) if Node in below.kinds]
        if nodes:
            return f" Type {nodes[0]}={{_target_:{show(value)}}}"
    return instead_of(key, None if value is None or isinstance(value, Mapping) else show(value), keys)


def read_text(key: str, text: str) -> Any:
    """Return a text at a dotted key of the schema as the number or truth value that it stands for, if it must be one.

    Environment variables, which a file has by `${oc.env:SEED}`, are texts.
    """
    section: Any = Config
    field = None
    for name in key.split("."):
        field = _named_fields(section).get(name) if section is not None else None
        section = field.section if field is not None else None
    return text if field is None else field.read_text(text)


def walk(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of everything in mappings and lists, at every depth."""
    items: Iterable[tuple[Any, Any]]
    if isinstance(node, Mapping):
        items = node.items()
    elif isinstance(node, list):
        items = enumerate(node)
    else:
        return
    for name, value in items:
        key = f"{path}.{name}" if path else str(name)
        yield key, value
        yield from walk(value, key)


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a nested configuration by their dotted keys; a list is one value."""
    leaves: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            leaves |= flatten(value, f"{prefix}{name}.")
        else:
            leaves[f"{prefix}{name}"] = value
    return leaves


def show(value: Any) -> str:
    """Return a value as it would be typed, shortened."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    if isinstance(value, str):
        text = value
    if len(text) > _MAX_SHOWN:
        return f"{text[: _MAX_SHOWN - 1]}…"
    return text


class _Field:
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

    def read_text(self, text: str) -> Any:
        """Return a text that stands for a number or a truth value, if only these are allowed, as one; else the text."""
        values = [text, _plain_value(text)]
        for value in values:
            if any(_convert(value, kind) is not _WRONG for kind in self.kinds):
                return value
        return text

    @property
    def allowed(self) -> str:
        """Describe the allowed values, for messages."""
        if self.section is not None:
            keys = ", ".join(field.name for field in _fields_of(self.section))
            return f"a mapping with the keys {keys}"
        limits = " and ".join(f"{word.replace('_', ' ')} {bound}" for word, bound in self.bounds.items())
        names: dict[Any, str] = {
            bool: "true or false",
            int: "a whole number" if float in self.kinds else f"a whole number {limits}".rstrip(),
            float: f"{'a fraction' if int in self.kinds else 'a number'} {limits}".rstrip(),
            str: "text",
            Duration: "a time such as 90s, 30m, 2h or 1d, or a number of seconds; above 0 and at most 365d",
            Texts: "a list of strings such as [one,two]",
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
        ways = [" or ".join(names.get(kind, options) for kind in self.kinds)]
        if self.auto:
            ways.append("auto")
        if self.nullable:
            ways.append("null")
        return ", or ".join(ways)


def _named_fields(section: type) -> dict[str, _Field]:
    return {field.name: field for field in _fields_of(section)}


@cache
def _fields_of(section: type) -> list[_Field]:
    hints = get_type_hints(section)
    return [_Field(field, hints[field.name]) for field in fields(section)]


class _Reader:
    """Read a whole configuration and collect its mistakes."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._raw = raw
        self.mistakes: list[str] = []

    def read_section(self, section: type, raw: Any, *, path: str) -> Any:
        """Return an instance of the dataclass `section`, in which wrong values are `_WRONG`."""
        values = {}
        for field in _fields_of(section):
            values[field.name] = self._read_key(field, raw, key=f"{path}{field.name}")
        for name in raw:
            if name not in values:
                self._report_unknown(f"{path}{name}", raw[name], among=values, within=path.rstrip("."))
        return section(**values)

    def _read_key(self, field: _Field, raw: Mapping[str, Any], *, key: str) -> Any:
        if field.name not in raw:
            return self._missing(field, key=key)
        value = raw[field.name]
        if value == _MISSING:
            return self._wrong(f"{key} has no value. It must be {field.allowed}.")
        if field.nullable and value is None:
            return None
        if field.auto and value == "auto":
            return None
        if field.nullable and isinstance(value, str) and value.lower() == "none":
            return self._wrong(f"{key}={value}: this is a text. Type {key}=null")

        if field.section is not None:
            if not isinstance(value, Mapping):
                return self._wrong(f"{key}={show(value)}: must be {field.allowed}.")
            return self.read_section(field.section, value, path=f"{key}.")
        if dict[str, Node] in field.kinds:
            # `optimizer` takes one node, too.
            if Node in field.kinds and (not isinstance(value, Mapping) or "_target_" in value):
                return self._read_node(value, key=key)
            return self._read_named_nodes(field, value, key=key)
        if Node in field.kinds:
            return self._read_node(value, key=key)
        return self._read_scalar(field, value, key=key)

    def _missing(self, field: _Field, *, key: str) -> Any:
        """Return the default: a user's own file for a group, or a run of an earlier version, may lack newer keys."""
        if field.default is not MISSING:
            return field.default
        if field.nullable:
            return None
        return self._wrong(f"{key} is missing. It must be {field.allowed}.")

    def _read_named_nodes(self, field: _Field, value: Any, *, key: str) -> Any:
        if not isinstance(value, Mapping):
            return self._wrong(f"{key}={show(value)}: must be {field.allowed}.")
        nodes = {}
        for name, node in value.items():
            # `callbacks.NAME=null` removes one.
            if node is not None:
                nodes[name] = self._read_node(node, key=f"{key}.{name}")
        return nodes

    def _read_node(self, node: Any, *, key: str) -> Any:
        if not isinstance(node, Mapping):
            hint = f" Write {key}: {{_target_: {node}}}" if _is_dotted_name(node) else ""
            return self._wrong(f"{key}={show(node)}: must be a mapping with `_target_`.{hint}")
        if "_target_" not in node:
            return self._wrong(
                f"{key} has no `_target_`. Choose an option of its group, or give it one: "
                f"+{key}._target_=package.module.Name"
            )
        for where, value in walk(node, key):
            if value == _MISSING:
                self._wrong(f"{where} has no value. Set {where}=VALUE")
            elif where.endswith("._target_") and not _is_dotted_name(value):
                self._wrong(f"{where}={show(value)}: must be a dotted name such as package.module.Name.")
        return node

    def _read_scalar(self, field: _Field, value: Any, *, key: str) -> Any:
        for kind in field.kinds:
            result = _convert(value, kind)
            if result is not _WRONG:
                # The first type that takes the value decides.
                if _within(result, field.bounds):
                    return result
                break
        return self._wrong(f"{key}={show(value)}: must be {field.allowed}.{_hint(field, value, key=key)}")

    def _report_unknown(self, key: str, value: Any, *, among: Iterable[str], within: str) -> None:
        shown = key if isinstance(value, Mapping) else f"{key}={show(value)}"
        hint = unknown_key_hint(key, value, known_keys(self._raw))
        if not hint:
            hint = f" {within or 'The configuration'} has {', '.join(among)}."
        self._wrong(f"{shown}: there is no such key.{hint}")

    def _wrong(self, mistake: str) -> Any:
        self.mistakes.append(mistake)
        return _WRONG


def _convert(value: Any, kind: Any) -> Any:
    """Return the value as one of the types that the schema lists; `_WRONG` if it isn't one of that type."""
    if kind is Duration:
        seconds = seconds_of(value)
        return _WRONG if seconds is None else seconds
    if kind is Texts:
        if isinstance(value, list) and all(_is_text(text) for text in value):
            return Texts(tuple(value))
        return _WRONG
    if kind == dict[str, str]:
        if isinstance(value, Mapping) and all(isinstance(text, str) for text in (*value, *value.values())):
            return dict(value)
        return _WRONG
    if kind is float and type(value) is int:
        return float(value)

    if kind == dict[str, Any]:
        is_right = isinstance(value, Mapping)
    elif kind is FunctionName:
        is_right = _is_dotted_name(value)
    elif kind is JobName:
        is_right = (isinstance(value, str) and value in JOBS) or _is_dotted_name(value)
    elif get_origin(kind) is Literal:
        is_right = value in get_args(kind)
    elif kind is str:
        is_right = _is_text(value)
    else:
        # By exact type: to Python, True is an int.
        is_right = type(value) is kind
    return value if is_right else _WRONG


def _plain_value(text: str) -> Any:
    """Return the number or truth value that a text stands for, else the text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def seconds_of(value: Any) -> Duration | None:
    """Return a duration such as `90s`, or a number of seconds, in seconds; None if it isn't one."""
    if isinstance(value, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", value.strip())
        if match is None:
            return None
        value = float(match[1]) * _UNIT_S[match[2]]
    # By exact type: to Python, True is an int.
    if type(value) not in (int, float) or not 0 < value <= _MAX_DURATION_S:
        return None
    return Duration(float(value))


def _within(value: Any, bounds: Mapping[str, float]) -> bool:
    """Return True if a value is no number, or a finite one inside the bounds."""
    if type(value) not in (int, float):
        return True
    # Not `math.isfinite`, which can't take whole numbers that are larger than any float.
    if not -math.inf < value < math.inf:
        return False
    at_least = bounds.get("at_least", -math.inf)
    at_most = bounds.get("at_most", math.inf)
    above = bounds.get("above", -math.inf)
    return bool(at_least <= value <= at_most and value > above)


def _hint(field: _Field, value: Any, *, key: str) -> str:
    """Suggest what to write instead, if there is a likely answer."""
    text = value_advice(key, show(value))
    if text is not None:
        return f" {text}"
    if isinstance(value, str) and field.read_text(value) != value:
        return " Here it is a text: write it without quotes."
    if Texts in field.kinds and isinstance(value, str) and value.strip():
        return f" Write {key}=[{value}]."
    if int in field.kinds and type(value) is float and value.is_integer():
        return f" Write {key}={int(value)}."
    if field.kinds == [bool] and str(value).lower() in _TRUTH_VALUES:
        return f" Write {key}={_TRUTH_VALUES[str(value).lower()]}."
    if field.options:
        guess = nearest(show(value), field.options)
        if guess is None:
            return ""
        return did_you_mean(f"{key}={guess}")
    if str in field.kinds and isinstance(value, (int, float)):
        return f" Quote it: {key}=\"'{value}'\"."
    return ""


def _is_dotted_name(target: Any) -> bool:
    return isinstance(target, str) and "." in target and all(part.isidentifier() for part in target.split("."))


def _keys(section: type, raw: Any, *, path: str) -> Iterator[str]:
    """Yield the dotted keys of a section, and those inside the nodes of `raw`."""
    for field in _fields_of(section):
        key = f"{path}{field.name}"
        yield key
        value = raw.get(field.name) if isinstance(raw, Mapping) else None
        if field.section is not None:
            yield from _keys(field.section, value, path=f"{key}.")
        elif Node in field.kinds or dict[str, Node] in field.kinds:
            for inner_key, _ in walk(value, key):
                yield inner_key
