"""Read files with a JSON row on each line, any of which may be damaged. No torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, final

from framework.system.files import open_regular, parse_json

Row = dict[str, Any]
Check = Callable[[Row], str | None]
"""Returns what is wrong with a row, None if nothing is."""

MAX_FILE_BYTES = 2**34
"""16 GiB, larger than any log."""

_MAX_LINE_BYTES = 2**26
# Larger than any step.
_MAX_STEP = 2**63

# Where one row ends and the next one begins, if the newline between them was damaged.
_LOST_NEWLINE = re.compile(rb'(?<=\}).(?=\{"step":)', re.DOTALL)


@final
@dataclass(frozen=True)
class Line:
    """A row and its text, or what is wrong with the line. Each row ends with a newline; only `\\n` ends a line."""

    # Counted from 1.
    number: int
    text: bytes
    row: Row | None
    # What is wrong with the line, if there is no row.
    fault: str | None = None
    # The newline after it was damaged or is missing in the file.
    is_repaired: bool = False


def read_lines(path: Path, *, check: Check | None = None, having: str | None = None) -> Iterator[Line]:
    """Yield the lines of a file. A row is an object with a whole number as `step`.

    Two rows between which the newline was damaged are two lines, and a last row without a newline gets one.

    Args:
        check: Says what else is wrong with a row.
        having: Skip lines without this key, which need not be parsed then.

    Raises:
        OSError: It isn't a regular file, or is larger than any log.
    """
    key = b"" if having is None else json.dumps(having).encode()
    with open_regular(path, max_bytes=MAX_FILE_BYTES) as file:
        number = 0
        while text := _next_line(file):
            number += 1
            if key not in text:
                continue
            line = _parsed(number, text, check)
            two_rows: list[Line] = []
            if line.row is None:
                two_rows = _split(number, text, check)
            if two_rows:
                yield from two_rows
            else:
                yield line


def _split(number: int, text: bytes, check: Check | None) -> list[Line]:
    """Return two rows whose newline was damaged; an empty list if the text isn't two rows."""
    for match in _LOST_NEWLINE.finditer(text):
        first = _parsed(number, text[: match.start()], check)
        second = _parsed(number, text[match.end() :], check)
        if first.row is not None and second.row is not None:
            return [first, second]
    return []


def _next_line(file: BinaryIO) -> bytes:
    """Return the next line; of an overlong line only the end, which doesn't parse as a row."""
    text = file.readline(_MAX_LINE_BYTES)
    while len(text) == _MAX_LINE_BYTES and not text.endswith(b"\n"):
        text = file.readline(_MAX_LINE_BYTES) or b"\n"
    return text


def _parsed(number: int, text: bytes, check: Check | None) -> Line:
    fault: str | None = None
    try:
        row = parse_json(text.decode(), allows_nan=False)
        if not isinstance(row, dict) or type(row.get("step")) is not int or abs(row["step"]) > _MAX_STEP:
            raise ValueError("it isn't a row with a step")
        if check is not None:
            fault = check(row)
    except ValueError as error:
        fault = str(error) if text.endswith(b"\n") else "it ends in the middle"
    if fault is not None:
        return Line(number, text, None, fault)
    if text.endswith(b"\n"):
        return Line(number, text, row)
    return Line(number, text + b"\n", row, is_repaired=True)


def metrics_fault(row: Row) -> str | None:
    """Return what is wrong with a row of metrics.jsonl: every value is a number, or null if it isn't finite."""
    nonfinite = row.get("nonfinite", {})
    if not isinstance(nonfinite, dict):
        return "nonfinite isn't an object"
    for name, value in row.items():
        if name != "nonfinite" and not (value is None or is_finite_number(value)):
            return f"{name} isn't a finite number"
    return None


def is_finite_number(value: Any) -> bool:
    """Return True for a number that fits into a float: JSON's integers, and its 1e999, may be larger."""
    if not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
