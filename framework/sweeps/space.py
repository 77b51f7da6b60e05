"""What a search chooses from: Hydra's sweep syntax, such as `optimizer.lr=tag(log,interval(1e-4,1))`, by key.

Nothing of Optuna here: `framework.sweeps.search` makes its distributions of these. Hydra's own parser reads the syntax.

| typed | a search draws |
|---|---|
| `a,b`, `choice(a,b)`, `glob(*)` | one of the values or options, in no order |
| `range(1,10)`, `range(0,1,0.25)` | one of the numbers that a grid would try, in their order; the stop isn't one |
| `interval(0.1,0.9)` | any number from 0.1 up to 0.9 |
| `int(interval(1,8))` | a whole number from 1 to 8, both included, as in Hydra's Optuna plugin |
| `tag(log,interval(1e-4,1))` | the same on a logarithmic scale; also of `int(interval(…))`, and of a range by 1 |

`sort` and `shuffle` are taken, and change nothing: a search tries values in an order of its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from hydra.errors import HydraException

from framework.config.hydra_compose import (
    ChoiceSweep,
    ConfigLoader,
    Glob,
    IntervalSweep,
    Override,
    OverridesParser,
    QuotedString,
    RangeSweep,
    with_cast_ends,
)
from framework.config.mistakes import raise_mistakes
from framework.config.overrides import quoted
from framework.config.secrets import masked_override

# Values of a range that isn't one of whole numbers. Hydra adds its step up, value by value.
_MAX_STEPS = 10_000
# Optuna keeps numbers as floats: larger whole numbers wouldn't be exact.
_MAX_INT = 2**53
_LOG = "log"
# What Hydra needs a backslash before, outside of quotes.
_SPECIAL = re.compile(r"[\\()\[\]{}:=, \t]")

Value = int | float | str
"""What a sampler draws for a key; `Dimension.text` turns it into the value of an override."""


@dataclass(frozen=True)
class Choice:
    """One of several values in no order: a sampler draws the text of one."""

    kind: ClassVar[str] = "choice"
    # Each as the value of an override.
    values: tuple[str, ...]

    def extremes(self) -> Sequence[Value]:
        return self.values

    def text(self, value: Value) -> str:
        return str(value)


@dataclass(frozen=True)
class Integers:
    """The whole numbers `low`, `low + step`, … `high`."""

    kind: ClassVar[str] = "int"
    low: int
    high: int
    step: int = 1
    log: bool = False

    def extremes(self) -> Sequence[Value]:
        return (self.low, self.high)

    def text(self, value: Value) -> str:
        return str(int(value))


@dataclass(frozen=True)
class Interval:
    """The numbers from `low` up to `high`."""

    kind: ClassVar[str] = "float"
    low: float
    high: float
    log: bool = False

    def extremes(self) -> Sequence[Value]:
        return (self.low, self.high)

    def text(self, value: Value) -> str:
        return repr(float(value))


@dataclass(frozen=True)
class Steps:
    """The numbers of a range with a fractional step: a sampler draws the position of one.

    Positions, because the same sum is rounded differently by Hydra and by Optuna, and the grid's numbers are meant.
    """

    kind: ClassVar[str] = "steps"
    values: tuple[float, ...]

    def extremes(self) -> Sequence[Value]:
        return (0, len(self.values) - 1)

    def text(self, value: Value) -> str:
        return repr(self.values[int(value)])


Dimension = Choice | Integers | Interval | Steps


@dataclass(frozen=True)
class Space:
    """The values that a search chooses from, by the key of the override as it was typed, such as `+model.depth`."""

    dimensions: Mapping[str, Dimension]

    def overrides(self, values: Mapping[str, Value]) -> tuple[str, ...]:
        """Return the overrides that set these values, which compose to exactly them; in the order that was typed."""
        return tuple(f"{key}={dimension.text(values[key])}" for key, dimension in self.dimensions.items())

    def samples(self) -> list[tuple[str, ...]]:
        """Return overrides that have each option, and the ends of each range, at least once."""
        firsts = {key: dimension.extremes()[0] for key, dimension in self.dimensions.items()}
        samples = [self.overrides(firsts)]
        for key, dimension in self.dimensions.items():
            samples += [self.overrides({**firsts, key: value}) for value in dimension.extremes()[1:]]
        return samples

    def as_json(self) -> dict[str, Any]:
        """Return what sweep.json has of it: plain values, by key."""
        entries = {}
        for key, dimension in self.dimensions.items():
            entry = {"kind": dimension.kind, **asdict(dimension)}
            if "values" in entry:
                # As JSON has it, so that what was read can be compared.
                entry["values"] = list(entry["values"])
            entries[key] = entry
        return entries

    def changes(self, planned: Mapping[str, Any]) -> list[str]:
        """Return what differs from the space in a sweep.json, a line for each key; none if it is the same space."""
        present = self.as_json()
        changes = []
        for key in [*planned, *present]:
            before = planned.get(key)
            after = present.get(key)
            line = f"{key}: {_described(before)} before, {_described(after)} now"
            if before != after and line not in changes:
                changes.append(line)
        return changes


def split_space(overrides: Sequence[str], *, loader: ConfigLoader | None) -> tuple[list[str], Space]:
    """Return the overrides that have one value, and the space of all others.

    Raises ConfigError that lists every override that a search can't choose values from. Keys of `sweep.over` must have
    been taken out before: a search gets the mean over their values and doesn't choose any.

    loader: Hydra's, which knows the options of groups; None if no override has `glob`.
    """
    parser = OverridesParser.create(loader)
    fixed = []
    dimensions: dict[str, Dimension] = {}
    mistakes = []
    for text in overrides:
        try:
            (override,) = parser.parse_overrides([text])
            if not override.is_sweep_override():
                fixed.append(text)
                continue
            key = override.get_key_element()
            if key in dimensions:
                raise ValueError(f"{key} is there twice. Leave one of them out.")
            dimensions[key] = _dimension(override)
        except HydraException as error:
            mistakes.append(f"{text}: {_reason(error)}")
        except ValueError as error:
            mistakes.append(f"{text}: {error}")
    raise_mistakes(mistakes)
    return fixed, Space(dimensions)


def _dimension(override: Override) -> Dimension:
    """Return what one override is to a search. Raises ValueError with the reason, and what to type, if it is nothing.

    Its HydraException is one of Hydra's for values that it can't make.
    """
    key = override.get_key_element()
    if override.is_delete():
        raise ValueError(f"what is removed has no values. Type {key}, or leave it out.")
    if override.is_hydra_override():
        raise ValueError("Hydra's own settings are the same for all trials. Give it one value.")

    sweep: Any = override.value()
    if isinstance(sweep, Glob):
        return _glob(override, key)
    unknown = sorted(sweep.tags - {_LOG})
    if unknown:
        raise ValueError(f"the tag {unknown[0]} means nothing to a search; {_LOG} is the only one that does.")
    log = _LOG in sweep.tags
    if isinstance(sweep, ChoiceSweep):
        return _choice(sweep, key, log=log)
    # Hydra 1.3 forgets the tags of a range that is cast.
    if "tag(" in str(override.input_line) and not log:
        raise ValueError("Hydra drops a tag inside of a cast. Put it outside, as tag(log,int(…)).")
    if isinstance(sweep, IntervalSweep):
        return _interval(sweep, log=log)
    assert isinstance(sweep, RangeSweep)
    return _range(with_cast_ends(sweep), key, log=log)


def _glob(override: Override, key: str) -> Choice:
    options = list(override.sweep_string_iterator())
    if not options:
        raise ValueError(f"{key} has no option of such a name.")
    return Choice(tuple(options))


def _choice(sweep: ChoiceSweep, key: str, *, log: bool) -> Choice:
    if log:
        raise ValueError(f"single values have no scale. Leave the tag out, or type {key}=tag(log,interval(LOW,HIGH)).")
    # A value that is there twice isn't more likely.
    values = tuple(dict.fromkeys(map(value_text, sweep.list)))
    for value in values:
        override = f"{key}={value}"
        if masked_override(override) != override:
            raise ValueError(
                "a search writes its values to files, and these are passwords or tokens. Give it one value."
            )
    return Choice(values)


def _range(sweep: RangeSweep, key: str, *, log: bool) -> Integers | Steps:
    assert sweep.start is not None
    assert sweep.stop is not None
    bounds = (sweep.start, sweep.stop, sweep.step)
    if not all(map(math.isfinite, bounds)) or sweep.step == 0:
        raise ValueError("a range has finite numbers, and a step other than 0.")
    if sweep.start == sweep.stop or (sweep.start < sweep.stop) != (sweep.step > 0):
        raise ValueError("this range is empty. It is range(START,STOP,STEP), and STOP isn't one of its values.")

    numbers = sweep.range()
    if isinstance(numbers, range):
        low, high = sorted((numbers[0], numbers[-1]))
        if log and numbers.step not in (1, -1):
            raise ValueError(f"with log, a range has no step. Type {key}=tag(log,range({low},{high + 1})).")
        return _integers(low, high, step=abs(numbers.step), log=log)

    num_steps = abs((sweep.stop - sweep.start) / sweep.step)
    if log:
        raise ValueError(f"with log, a range has whole numbers. Type {key}=tag(log,interval({_ends(sweep)})).")
    if num_steps > _MAX_STEPS:
        raise ValueError(f"this range has {num_steps:.0f} values. Type {key}=interval({_ends(sweep)}).")
    return Steps(tuple(sorted(numbers)))


def _ends(sweep: RangeSweep) -> str:
    assert sweep.start is not None
    assert sweep.stop is not None
    low, high = sorted((sweep.start, sweep.stop))
    return f"{low},{high}"


def _interval(sweep: IntervalSweep, *, log: bool) -> Integers | Interval:
    assert sweep.start is not None
    assert sweep.end is not None
    low = sweep.start
    high = sweep.end
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError("the ends of an interval are finite numbers.")
    if low >= high:
        raise ValueError("this interval is empty: its first end must be smaller than its second.")
    # By exact type: both ends are cast, or none.
    if type(low) is int and type(high) is int:
        return _integers(low, high, step=1, log=log)
    if log and low <= 0:
        raise ValueError("a logarithmic scale has no 0 and nothing below: the lower end must be above 0.")
    return Interval(float(low), float(high), log)


def _integers(low: int, high: int, *, step: int, log: bool) -> Integers:
    if log and low < 1:
        raise ValueError("a logarithmic scale has no 0 and nothing below: the smallest number must be at least 1.")
    if max(abs(low), abs(high)) > _MAX_INT:
        raise ValueError(f"a search has whole numbers up to {_MAX_INT}.")
    return Integers(low, high, step, log)


# Values of overrides


def value_text(value: Any) -> str:
    """Return a value that Hydra has parsed, as the value of an override that it parses to the same again.

    Not by Hydra's own function, which forgets that the text of `str(1)` was no number.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, QuotedString):
        return value.with_quotes()
    if isinstance(value, str):
        return _string_text(value)
    if isinstance(value, list):
        return f"[{','.join(map(value_text, value))}]"
    if isinstance(value, dict):
        items = [f"{_name_text(name)}:{value_text(item)}" for name, item in value.items()]
        return f"{{{','.join(items)}}}"
    raise ValueError("a list of values has single values only. Give the range or interval alone.")


def _string_text(value: str) -> str:
    """Return a string without quotes if Hydra takes it for the same string, else with quotes."""
    try:
        # In a list, because nothing at all is a string only where it is the whole value.
        is_plain = OverridesParser.create().parse_override(f"key=[{value}]").value() == [value]
    except HydraException:
        is_plain = False
    return value if is_plain else quoted(value)


def _name_text(name: Any) -> str:
    """Return a key of a mapping, which Hydra takes without quotes only."""
    if isinstance(name, str):
        return _SPECIAL.sub(r"\\\g<0>", name)
    return value_text(name)


def _reason(error: HydraException) -> str:
    """Return what Hydra says of a value, without the override that it repeats and the address of its manual."""
    lines = []
    for line in str(error).splitlines():
        if not line.startswith(("Error parsing override", "See https://")):
            lines.append(line.strip())
    return " ".join(lines)


def _described(entry: Mapping[str, Any] | None) -> str:
    """Return a dimension of a sweep.json as text."""
    if entry is None:
        return "one value"
    if entry.get("kind") in (Choice.kind, Steps.kind):
        return ", ".join(map(str, entry.get("values", [])))
    scale = " (log)" if entry.get("log") else ""
    step = entry.get("step", 1)
    steps = "" if step == 1 else f" by {step}"
    return f"{entry.get('low')} to {entry.get('high')}{steps}{scale}"
