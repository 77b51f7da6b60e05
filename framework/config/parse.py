"""Parse the composed mapping into the frozen `Config`, by the types and bounds of the schema's dataclasses.

All mistakes are collected and reported together.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from framework.config.schema import PRECISION_ALIASES, Config, Duration, Node, Precision, Texts
from framework.config.suggest import did_you_mean, nearest, nearest_key
from framework.errors import ConfigError

_UNIT_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_MAX_DURATION_S = 365 * 86400  # beyond it the clocks of torch and the system overflow
_MAX_SHOWN = 60  # characters of a wrong value
_MAX_MISTAKES = 20
_MISSING = "???"  # OmegaConf's mark for a value that has to be given
_WRONG: Any = object()  # stands for a value that has been reported as wrong


def parse(raw: Mapping[str, Any]) -> Config:
    """Return the configuration in `raw`: plain mappings, lists and scalars, with interpolations resolved.

    Raises ConfigError naming every unknown or missing key and every value of a wrong type or out of range.
    """
    reader = _Reader(raw)
    config = reader.read_section(Config, raw, path="")
    raise_mistakes(reader.mistakes)
    return config  # type: ignore[no-any-return]


def raise_mistakes(mistakes: list[str]) -> None:
    """Raise one ConfigError that lists all of `mistakes`; do nothing if there are none."""
    if not mistakes:
        return
    if len(mistakes) == 1:
        raise ConfigError(mistakes[0])
    shown = [f"  - {mistake}" for mistake in mistakes[:_MAX_MISTAKES]]
    if len(mistakes) > _MAX_MISTAKES:
        shown.append(f"  … and {len(mistakes) - _MAX_MISTAKES} more")
    raise ConfigError("\n".join([f"The configuration has {len(mistakes)} mistakes:", *shown]))


def known_keys(raw: Mapping[str, Any] | None = None) -> list[str]:
    """Return every dotted key that the framework reads, sections included, and those inside the nodes of `raw`."""
    return list(_keys(Config, raw, path=""))


def spelled_out(override: str) -> str:
    """Return `preflight=true` as `preflight.enabled=true`, so that its place among the section's other keys doesn't
    matter; return any other override unchanged."""
    return re.sub(r"^(\+*preflight)=(?!\s*\{)", r"\1.enabled=", override)


def walk(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of everything in mappings and lists, at every depth."""
    items = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    for name, value in items:
        key = f"{path}.{name}" if path else str(name)
        yield key, value
        yield from walk(value, key)


def show(value: Any) -> str:
    """Return a value as it would be typed, shortened."""
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 1]}…"


@dataclass(frozen=True)
class _Field:
    """One key, as described by the type hint and metadata of a dataclass field."""

    name: str
    kinds: tuple[Any, ...]  # of bool, int, float, str, Duration, Texts, Node and Enums
    section: type | None  # the dataclass below this key
    many_nodes: bool  # dict[str, Node]
    nullable: bool
    auto: bool
    default: Any  # `dataclasses.MISSING` for none
    bounds: Mapping[str, float]  # at_least, above, at_most

    @property
    def allowed(self) -> str:
        """Describe the allowed values, for messages."""
        if self.section is not None:
            return f"a mapping with the keys {', '.join(field.name for field in _fields_of(self.section))}"
        if self.many_nodes:
            return "a mapping from names to mappings with `_target_`"
        parts = [_describe(self.kinds, self.bounds)]
        parts += ["auto"] if self.auto else []
        parts += ["null"] if self.nullable else []
        return ", or ".join(parts)


@cache
def _fields_of(section: type) -> tuple[_Field, ...]:
    hints = get_type_hints(section)
    return tuple(_make_field(field, hints[field.name]) for field in fields(section))


def _make_field(field: Field[Any], hint: Any) -> _Field:
    options = get_args(hint) if get_origin(hint) in (UnionType, Union) else (hint,)
    kinds = tuple(kind for kind in options if kind is not NoneType)
    return _Field(
        name=field.name,
        kinds=kinds,
        section=kinds[0] if is_dataclass(kinds[0]) and isinstance(kinds[0], type) else None,
        many_nodes=get_origin(kinds[0]) is dict,
        nullable=NoneType in options,
        auto="auto" in field.metadata,
        default=field.default,
        bounds=field.metadata.get("bounds", {}),
    )


def _describe(kinds: tuple[Any, ...], bounds: Mapping[str, float]) -> str:
    if len(kinds) == 1 and isinstance(kinds[0], type) and issubclass(kinds[0], Enum):
        return f"one of {', '.join(_written(kinds[0]))}"
    names = {
        bool: "true or false",
        int: "a whole number",
        float: "a number" if int not in kinds else "a fraction",
        str: "text",
        Duration: "a time such as 90s, 30m, 2h or 1d, or a number of seconds; above 0 and at most 365d",
        Texts: "a list of texts such as [one,two]",
        Node: "a mapping with `_target_`",
    }
    # Bounds come last, after the number types that they apply to.
    types = " or ".join(names[kind] for kind in sorted(kinds, key=lambda kind: kind is not bool))
    limits = " and ".join(f"{word.replace('_', ' ')} {bound}" for word, bound in bounds.items())
    return f"{types} {limits}".rstrip()


class _Reader:
    """Read a whole configuration and collect its mistakes."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._raw = raw
        self.mistakes: list[str] = []

    def read_section(self, section: type, raw: Any, *, path: str) -> Any:
        """Return an instance of the dataclass `section`, in which wrong values are `_WRONG`."""
        values = {field.name: self._read_key(field, raw, path=path) for field in _fields_of(section)}
        for key in raw:
            if key not in values:
                self._report_unknown(f"{path}{key}", raw[key], among=tuple(values), within=path.rstrip("."))
        return section(**values)

    def _read_key(self, field: _Field, raw: Mapping[str, Any], *, path: str) -> Any:
        key = f"{path}{field.name}"
        if field.name not in raw:
            # A user's own file for a group, or a run saved by an earlier version, may lack newer keys.
            if field.default is not MISSING:
                return field.default
            if field.nullable:
                return None
            return self._wrong(f"{key} is missing. It must be {field.allowed}.")
        value = raw[field.name]
        if value == _MISSING:
            return self._wrong(f"{key} has no value. It must be {field.allowed}.")
        if field.nullable and (value is None or (field.auto and value == "auto")):
            return None
        if field.section is not None or field.many_nodes or Node in field.kinds:
            return self._read_mapping(field, value, key=key)
        return self._read_scalar(field, value, key=key)

    def _read_mapping(self, field: _Field, value: Any, *, key: str) -> Any:
        if not isinstance(value, Mapping):
            hint = f" Remove it with ~{key}." if value is None and field.many_nodes else ""
            return self._wrong(f"{key}={show(value)}: must be {field.allowed}.{hint}")
        if field.section is not None:
            return self.read_section(field.section, value, path=f"{key}.")
        if field.many_nodes and "_target_" in value:
            return self._wrong(f"{key}._target_={show(value['_target_'])}: must be below a name: {key}.NAME._target_")
        if field.many_nodes:
            return {name: self._read_node(node, key=f"{key}.{name}", removable=True) for name, node in value.items()}
        return self._read_node(value, key=key)

    def _read_node(self, node: Any, *, key: str, removable: bool = False) -> Any:
        if not isinstance(node, Mapping):
            hint = f" Remove it with ~{key}." if removable and node is None else ""
            return self._wrong(f"{key}={show(node)}: must be a mapping with `_target_`.{hint}")
        if "_target_" not in node:
            own = f"+{key}._target_=package.module.Name"
            return self._wrong(f"{key} has no `_target_`. Choose an option of its group, or give it one: {own}")
        for where, value in walk(node, key):
            if value == _MISSING:
                self._wrong(f"{where} has no value. Set {where}=VALUE")
            elif where.endswith("._target_") and not _is_dotted_name(value):
                self._wrong(f"{where}={show(value)}: must be a dotted name such as package.module.Name.")
        return node

    def _read_scalar(self, field: _Field, value: Any, *, key: str) -> Any:
        result = _convert(value, field.kinds)
        if result is _WRONG or not _within(result, field.bounds):
            return self._wrong(f"{key}={show(value)}: must be {field.allowed}.{_hint(field, value, key=key)}")
        return result

    def _report_unknown(self, key: str, value: Any, *, among: tuple[str, ...], within: str) -> None:
        guess = nearest_key(key, known_keys(self._raw))
        shown = key if isinstance(value, Mapping) else f"{key}={show(value)}"
        keys = "" if guess else f" {within or 'The configuration'} has {', '.join(among)}."
        self._wrong(f"{shown}: there is no such key.{did_you_mean(guess)}{keys}")

    def _wrong(self, mistake: str) -> Any:
        self.mistakes.append(mistake)
        return _WRONG


def _written(kind: type[Enum]) -> list[str]:
    """Return the values of an Enum as they are typed."""
    return [show(member.value) for member in kind]


def _convert(value: Any, kinds: Iterable[Any]) -> Any:
    results = (_convert_to(kind, value) for kind in kinds)
    return next((result for result in results if result is not _WRONG), _WRONG)


def _convert_to(kind: Any, value: Any) -> Any:
    if kind is Duration:
        return _duration(value)
    if kind is Texts:
        return _texts(value)
    if issubclass(kind, Enum):
        return next((member for member in kind if type(value) is type(member.value) and member.value == value), _WRONG)
    if kind is float and type(value) is int:
        return float(value)
    if kind is str:
        return value if isinstance(value, str) and value.strip() else _WRONG
    # By exact type: to Python, True is an int.
    return value if type(value) is kind else _WRONG


def seconds_of(text: str) -> float | None:
    """Return a duration such as `90s` in seconds; None if `text` isn't one."""
    seconds = _duration(float(text) if text.replace(".", "", 1).isdecimal() else text)
    return None if seconds is _WRONG else float(seconds)


def _duration(value: Any) -> Any:
    seconds: float | None = None
    if type(value) in (int, float):
        seconds = float(value)
    elif isinstance(value, str) and (match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", value.strip())):
        seconds = float(match[1]) * _UNIT_S[match[2]]
    return Duration(seconds) if seconds is not None and 0 < seconds <= _MAX_DURATION_S else _WRONG


def _texts(value: Any) -> Any:
    if not isinstance(value, list) or any(_convert_to(str, text) is _WRONG for text in value):
        return _WRONG
    return Texts(tuple(value))


def _within(value: Any, bounds: Mapping[str, float]) -> bool:
    if type(value) is float and not math.isfinite(value):
        return False
    if type(value) not in (int, float):
        return True
    return (
        value >= bounds.get("at_least", -math.inf)
        and value <= bounds.get("at_most", math.inf)
        and ("above" not in bounds or value > bounds["above"])
    )


def _hint(field: _Field, value: Any, *, key: str) -> str:
    """Suggest what to write instead, if there is a likely answer."""
    kind = field.kinds[0]
    if isinstance(kind, type) and issubclass(kind, Enum):
        guess = nearest(show(value), _written(kind))
        if kind is Precision and str(value) in PRECISION_ALIASES:
            guess = PRECISION_ALIASES[str(value)].value
        return did_you_mean(guess and f"{key}={guess}")
    if int in field.kinds and type(value) is float and math.isfinite(value) and value.is_integer():
        return f" Write {key}={int(value)}."
    if Texts in field.kinds and isinstance(value, str) and value.strip():
        return f" Write {key}=[{value}]."
    if str in field.kinds and isinstance(value, (int, float)):
        return f" Quote it: {key}=\"'{value}'\"."
    return ""


def _is_dotted_name(target: Any) -> bool:
    return isinstance(target, str) and "." in target and all(part.isidentifier() for part in target.split("."))


def _keys(section: type, raw: Any, *, path: str) -> Iterator[str]:
    """Yield the dotted keys of a section, and those inside the nodes of `raw`."""
    for field in _fields_of(section):
        key = f"{path}{field.name}"
        value = raw.get(field.name) if isinstance(raw, Mapping) else None
        yield key
        if field.section is not None:
            yield from _keys(field.section, value, path=f"{key}.")
        elif field.many_nodes or Node in field.kinds:
            yield from (inner for inner, _ in walk(value, key))
