"""Values of keys: converted to the types that the schema lists, and shown as they would be typed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal, get_args, get_origin

from framework.config.jobs import JOBS
from framework.config.schema import Duration, FunctionName, JobName, Steps, Texts

WRONG: Any = object()
"""Stands for a value that isn't of the type that it must be of."""

_UNIT_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
# Beyond a year, the clocks of torch and of the system overflow.
_MAX_DURATION_S = 365 * 86400
# Characters of a value in a message.
_MAX_SHOWN = 60


def convert(value: Any, kind: Any) -> Any:
    """Return the value as one of the types that the schema lists; WRONG if it isn't one of that type."""
    if kind is Duration:
        seconds = seconds_of(value)
        return WRONG if seconds is None else seconds
    if kind is Texts:
        if isinstance(value, list) and all(_is_text(text) for text in value):
            return Texts(tuple(value))
        return WRONG
    if kind is Steps:
        # By exact type: to Python, True is an int.
        if isinstance(value, list) and all(type(step) is int and step >= 1 for step in value):
            return Steps(tuple(value))
        return WRONG
    if kind == dict[str, str]:
        if isinstance(value, Mapping) and all(isinstance(text, str) for text in (*value, *value.values())):
            return dict(value)
        return WRONG
    if kind is float and type(value) is int:
        return float(value)

    if kind == dict[str, Any]:
        is_right = isinstance(value, Mapping)
    elif kind is FunctionName:
        is_right = is_dotted_name(value)
    elif kind is JobName:
        is_right = (isinstance(value, str) and value in JOBS) or is_dotted_name(value)
    elif get_origin(kind) is Literal:
        is_right = value in get_args(kind)
    elif kind is str:
        is_right = _is_text(value)
    else:
        # By exact type: to Python, True is an int.
        is_right = type(value) is kind
    return value if is_right else WRONG


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


def is_dotted_name(value: Any) -> bool:
    """Return True for a text such as `package.module.Name`."""
    return isinstance(value, str) and "." in value and all(part.isidentifier() for part in value.split("."))


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def is_within(value: Any, bounds: Mapping[str, float]) -> bool:
    """Return True if a value is no number, or a finite one inside the bounds: `at_least`, `above`, `at_most`."""
    if type(value) not in (int, float):
        return True
    # Not `math.isfinite`, which can't take whole numbers that are larger than any float.
    if not -math.inf < value < math.inf:
        return False
    at_least = bounds.get("at_least", -math.inf)
    at_most = bounds.get("at_most", math.inf)
    above = bounds.get("above", -math.inf)
    return bool(at_least <= value <= at_most and value > above)


# Texts


def number_or_bool(text: str) -> Any:
    """Return the number or truth value that a text stands for, else the text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def show(value: Any) -> str:
    """Return a value as it would be typed, shortened."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    if isinstance(value, str):
        text = value
    if len(text) > _MAX_SHOWN:
        return f"{text[: _MAX_SHOWN - 1]}…"
    return text
