"""From the composed mapping to the frozen `Config`: strict, driven by the dataclasses' own types and bounds.

Every mistake of a configuration is found before any is raised, so that one start shows them all.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
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
_WRONG: Any = object()  # what a reader gives for a value it has reported


def parse(raw: Mapping[str, Any]) -> Config:
    """The configuration in `raw`, which holds plain mappings, lists and scalars, resolved.

    Raises ConfigError naming every unknown or missing key and every value of a wrong type or out of range.
    """
    reader = _Reader(raw)
    config = reader.read_section(Config, raw, path="")
    raise_mistakes(reader.mistakes)
    return config  # type: ignore[no-any-return]


def raise_mistakes(mistakes: list[str]) -> None:
    """Raise one ConfigError that shows all of `mistakes`; nothing where there is none."""
    if not mistakes:
        return
    if len(mistakes) == 1:
        raise ConfigError(mistakes[0])
    shown = [f"  - {mistake}" for mistake in mistakes[:_MAX_MISTAKES]]
    if len(mistakes) > _MAX_MISTAKES:
        shown.append(f"  … and {len(mistakes) - _MAX_MISTAKES} more")
    raise ConfigError("\n".join([f"The configuration has {len(mistakes)} mistakes:", *shown]))


def known_keys(raw: Mapping[str, Any]) -> list[str]:
    """Every dotted key the framework reads, and those inside the nodes of `raw`."""
    return sorted({*schema_keys(), *_node_keys(Config, raw, path="")})


@cache
def schema_keys(section: type = Config, *, path: str = "") -> tuple[str, ...]:
    """Every dotted key of a dataclass of the schema, sections included."""
    keys: list[str] = []
    for field in _fields_of(section):
        key = f"{path}{field.name}"
        keys.append(key)
        if field.section is not None:
            keys.extend(schema_keys(field.section, path=f"{key}."))
    return tuple(keys)


def spelled_out(override: str) -> str:
    """`preflight=true` as `preflight.enabled=true`, so that it goes with the section's other keys in any order; any
    other override as it is."""
    key, equals, value = override.partition("=")
    name = key.lstrip("+")
    is_switch = any(field.switch and field.name == name for field in _fields_of(Config))
    if not equals or not is_switch or value.lstrip().startswith("{"):
        return override
    return f"{key}.enabled={value}"


def node_above(key: str) -> str | None:
    """The key of the node that `key` is a keyword of; None for a key that is the framework's own, or unknown."""
    parts = key.split(".")
    section: type | None = Config
    for depth, part in enumerate(parts):
        field = next((field for field in _fields_of(section) if field.name == part), None) if section else None
        if field is None:
            return None
        if field.many_nodes or Node in field.kinds:
            length = depth + (2 if field.many_nodes else 1)
            return ".".join(parts[:length]) if len(parts) > length else None
        section = field.section
    return None


def show(value: Any) -> str:
    """A value as it would be typed, shortened."""
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 1]}…"


@dataclass(frozen=True)
class _Field:
    """One key: what the type hint and the metadata of a dataclass's field say."""

    name: str
    kinds: tuple[Any, ...]  # of bool, int, float, str, Duration, Texts, Node and Enums
    section: type | None  # the dataclass below this key
    many_nodes: bool  # dict[str, Node]
    nullable: bool
    auto: bool
    switch: bool  # a section that may be true or false
    default: Any  # `dataclasses.MISSING` for none
    bounds: Mapping[str, float]

    @property
    def allowed(self) -> str:
        """What the value must be, for a message."""
        if self.section is not None:
            either = "true, false or " if self.switch else ""
            return f"{either}a mapping with the keys {', '.join(field.name for field in _fields_of(self.section))}"
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
    metadata = field.metadata
    kinds = get_args(hint) if get_origin(hint) in (UnionType, Union) else (hint,)
    nullable = NoneType in kinds
    kinds = tuple(kind for kind in kinds if kind is not NoneType)
    return _Field(
        name=field.name,
        kinds=kinds,
        section=kinds[0] if is_dataclass(kinds[0]) and isinstance(kinds[0], type) else None,
        many_nodes=get_origin(kinds[0]) is dict,
        nullable=nullable,
        auto=bool(metadata.get("auto")),
        switch=bool(metadata.get("switch")),
        default=field.default,
        bounds={key: metadata[key] for key in ("at_least", "above", "at_most") if metadata.get(key) is not None},
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
    words = {"at_least": "at least", "above": "above", "at_most": "at most"}
    limits = " and ".join(f"{words[key]} {bound}" for key, bound in bounds.items())
    # Bounds follow the numbers they are meant for.
    return " ".join(
        [" or ".join(names[kind] for kind in sorted(kinds, key=lambda kind: kind is not bool)), limits]
    ).rstrip()


class _Reader:
    """Reads a whole configuration and keeps what is wrong with it."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._raw = raw
        self.mistakes: list[str] = []

    def read_section(self, section: type, raw: Any, *, path: str) -> Any:
        """An instance of the dataclass `section`; `_WRONG` after anything below it was reported."""
        values = {field.name: self._read_key(field, raw, path=path) for field in _fields_of(section)}
        for key in raw:
            if key not in values:
                self._report_unknown(f"{path}{key}", raw[key], among=tuple(values), within=path.rstrip("."))
        return _WRONG if any(value is _WRONG for value in values.values()) else section(**values)

    def _read_key(self, field: _Field, raw: Mapping[str, Any], *, path: str) -> Any:
        key = f"{path}{field.name}"
        if field.name not in raw:
            # A user's own file of a group, or a run saved by an earlier version, may not know every key.
            if field.default is not MISSING:
                return field.default
            if field.nullable:
                return None
            return self._wrong(f"{key} is missing. It must be {field.allowed}.")
        value = raw[field.name]
        if value == _MISSING:
            return self._wrong(f"{key} has no value yet. It must be {field.allowed}.")
        if field.nullable and (value is None or (field.auto and value == "auto")):
            return None
        if field.section is not None or field.many_nodes or Node in field.kinds:
            return self._read_mapping(field, value, key=key)
        return self._read_scalar(field, value, key=key)

    def _read_mapping(self, field: _Field, value: Any, *, key: str) -> Any:
        if field.switch and isinstance(value, bool):
            return replace(field.default, enabled=value)
        if not isinstance(value, Mapping):
            hint = f" Remove it with ~{key}." if value is None and field.many_nodes else ""
            return self._wrong(f"{key}={show(value)}: must be {field.allowed}.{hint}")
        if field.section is not None:
            return self.read_section(field.section, value, path=f"{key}.")
        if field.many_nodes and "_target_" in value:
            return self._wrong(f"{key}._target_={show(value['_target_'])}: must be below a name: {key}.NAME._target_")
        if field.many_nodes:
            nodes = {name: self._read_node(node, key=f"{key}.{name}", removable=True) for name, node in value.items()}
            return _WRONG if any(node is _WRONG for node in nodes.values()) else nodes
        return self._read_node(value, key=key)

    def _read_node(self, node: Any, *, key: str, removable: bool = False) -> Any:
        if not isinstance(node, Mapping):
            hint = f" Remove it with ~{key}." if removable and node is None else ""
            return self._wrong(f"{key}={show(node)}: must be a mapping with `_target_`.{hint}")
        if "_target_" not in node:
            own = f"+{key}._target_=package.module.Name"
            return self._wrong(f"{key} has no `_target_`. Choose an option of its group, or give it one: {own}")
        before = len(self.mistakes)
        for where, value in _leaves(node, key=key):
            if value == _MISSING:
                self._wrong(f"{where} has no value yet. Give it one: {where}=VALUE")
            elif where.endswith("._target_") and not _is_dotted_name(value):
                self._wrong(f"{where}={show(value)}: must be a dotted name such as package.module.Name.")
        return node if len(self.mistakes) == before else _WRONG

    def _read_scalar(self, field: _Field, value: Any, *, key: str) -> Any:
        result = _convert(value, field.kinds)
        if result is not _WRONG and not _within(result, field.bounds):
            result = _WRONG
        if result is _WRONG:
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
    for kind in kinds:
        result = _convert_to(kind, value)
        if result is not _WRONG:
            return result
    return _WRONG


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
    # By exact type: True is an int to Python, but to nobody who writes a configuration.
    return value if type(value) is kind else _WRONG


def seconds_of(text: str) -> float | None:
    """The seconds that a `Duration` such as `90s` is; None where it is none."""
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
    """What to write instead, where that can be told."""
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


def _leaves(node: Any, *, key: str) -> Iterator[tuple[str, Any]]:
    """Every value in a node and below it that holds no others, with its full key."""
    inner: Iterable[tuple[Any, Any]]
    if isinstance(node, Mapping):
        inner = node.items()
    elif isinstance(node, list):
        inner = enumerate(node)
    else:
        yield key, node
        return
    for name, value in inner:
        yield from _leaves(value, key=f"{key}.{name}")


def _is_dotted_name(target: Any) -> bool:
    return isinstance(target, str) and "." in target and all(part.isidentifier() for part in target.split("."))


def _node_keys(section: type, raw: Any, *, path: str) -> Iterator[str]:
    if not isinstance(raw, Mapping):
        return
    for field in _fields_of(section):
        key, value = f"{path}{field.name}", raw.get(field.name)
        if field.section is not None:
            yield from _node_keys(field.section, value, path=f"{key}.")
        elif field.many_nodes or Node in field.kinds:
            yield from _dotted_keys(value, path=key)


def _dotted_keys(value: Any, *, path: str) -> Iterator[str]:
    yield path
    if isinstance(value, Mapping):
        for name, below in value.items():
            yield from _dotted_keys(below, path=f"{path}.{name}")
