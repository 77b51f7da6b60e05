"""Parse the composed mapping into the frozen `Config`, by the types and bounds of the schema's dataclasses.

All mistakes are collected and reported together.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from framework.config.jobs import JOBS
from framework.config.renamed import with_present_names
from framework.config.schema import Config, Duration, FunctionName, JobName, Node, Texts
from framework.config.suggest import did_you_mean, nearest, nearest_key
from framework.errors import ConfigError

PACKAGE_LINE = "The first line of a recipe's file must be `# @package _global_`."

_UNIT_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
# Beyond a year, the clocks of torch and of the system overflow.
_MAX_DURATION_S = 365 * 86400
# Characters of a wrong value in a message.
_MAX_SHOWN = 60
# OmegaConf's mark for a value that has to be given.
_MISSING = "???"
# Stands for a value that has been reported as wrong.
_WRONG: Any = object()
# Other common names of precisions, for suggestions. In Lightning, bf16 is not bf16-true.
_PRECISIONS = {"bf16": "bf16-mixed", "fp16": "16-mixed", "fp32": "32-true", "fp64": "64-true", "double": "64-true"}


def parse(raw: Mapping[str, Any]) -> Config:
    """Return the configuration in `raw`: plain mappings, lists and scalars, with interpolations resolved.

    Raises ConfigError naming every unknown or missing key and every value of a wrong type or out of range.
    """
    raw = with_present_names(raw)
    reader = _Reader(raw)
    config = reader.read_section(Config, raw, path="")
    raise_mistakes(reader.mistakes)
    return config  # type: ignore[no-any-return]


def raise_mistakes(mistakes: list[str]) -> None:
    """Raise one ConfigError that lists all of `mistakes`; do nothing if there are none."""
    if len(mistakes) == 1:
        raise ConfigError(mistakes[0])
    if mistakes:
        lines = [f"The configuration has {len(mistakes)} mistakes:"]
        lines += [f"  - {mistake}" for mistake in mistakes]
        raise ConfigError("\n".join(lines))


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

    keys = _named_fields(field.section) if field.section is not None else {}
    if not below and field.shorthand is not None and not value.lstrip().startswith("{"):
        below = f".{field.shorthand}"
        if keys[field.shorthand].kinds == [Texts]:
            value = _as_list(value)
    key = keys.get(below.removeprefix("."))
    if key is not None and key.verbatim:
        value = _as_quoted(value)
    return f"{plus}{section}{below}={value}"


def _as_list(value: str) -> str:
    is_whole = not value or value == "null" or value.lstrip().startswith("[")
    return value if is_whole else f"[{value}]"


def _as_quoted(value: str) -> str:
    is_whole = not value or value == "null" or value.startswith(("'", '"'))
    return value if is_whole else f"'{value}'"


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
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
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

    @property
    def allowed(self) -> str:
        """Describe the allowed values, for messages."""
        if self.section is not None:
            keys = ", ".join(field.name for field in _fields_of(self.section))
            return f"a mapping with the keys {keys}"
        names: dict[Any, str] = {
            bool: "true or false",
            int: "a whole number",
            float: "a fraction" if int in self.kinds else "a number",
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
        options = f"one of {', '.join(self.options)}"
        types = " or ".join(names.get(kind, options) for kind in self.kinds)
        limits = " and ".join(f"{word.replace('_', ' ')} {bound}" for word, bound in self.bounds.items())
        ways = [f"{types} {limits}".rstrip()]
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
            return self._wrong(f"{key}={show(node)}: must be a mapping with `_target_`.")
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
        guess = nearest_key(key, known_keys(self._raw))
        if guess is not None:
            hint = did_you_mean(guess)
        else:
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
    if Texts in field.kinds and isinstance(value, str) and value.strip():
        return f" Write {key}=[{value}]."
    if field.options:
        typed = show(value)
        guess = nearest(_PRECISIONS.get(typed, typed), field.options)
        return "" if guess is None else did_you_mean(f"{key}={guess}")
    if int in field.kinds and type(value) is float and value.is_integer():
        return f" Write {key}={int(value)}."
    if field.name == "recipe" and isinstance(value, Mapping):
        return f" {PACKAGE_LINE}"
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
