"""Read files with a JSON row on each line, any of which may be damaged. No torch."""

from __future__ import annotations

import json
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
_MAX_LINE_BYTES = 2**26

# Where one row ends and the next one begins, if the newline between them was damaged.
_LOST_NEWLINE = re.compile(rb'(?<=\}).(?=\{"step":)', re.DOTALL)


@final
@dataclass(frozen=True)
class Line:
    """A row and its text, or what is wrong with the line. Each row ends with a newline; only `\\n` ends a line."""

    number: int  # counted from 1
    text: bytes
    row: Row | None
    fault: str | None = None
    # The newline after it was damaged or is missing in the file.
    is_repaired: bool = False


def read_lines(path: Path, *, check: Check | None = None, having: str | None = None) -> Iterator[Line]:
    """Yield the lines of a file. A row is an object with a whole number as `step`, for which `check` returns None.

    Two rows between which the newline was damaged are two lines, and a last row without a newline gets one. Raises
    OSError if it isn't a regular file, or is larger than any log is.

    having: skip lines without this key, which need not be parsed then.
    """
    key = b"" if having is None else json.dumps(having).encode()
    with open_regular(path, max_bytes=MAX_FILE_BYTES) as file:
        number = 0
        while text := _next_line(file):
            number += 1
            if key not in text:
                continue
            line = _parsed(number, text, check)
            if line.row is None:
                for match in _LOST_NEWLINE.finditer(text):
                    two = [_parsed(number, half, check) for half in (text[: match.start()], text[match.end() :])]
                    if all(each.row is not None for each in two):
                        yield from two
                        break
                else:
                    yield line
            else:
                yield line


def _next_line(file: BinaryIO) -> bytes:
    """Return the next line; of an overlong line only the end, which doesn't parse as a row."""
    text = file.readline(_MAX_LINE_BYTES)
    while len(text) == _MAX_LINE_BYTES and not text.endswith(b"\n"):
        text = file.readline(_MAX_LINE_BYTES) or b"\n"
    return text


def _parsed(number: int, text: bytes, check: Check | None) -> Line:
    try:
        row = parse_json(text.decode(), allows_nan=False)
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            raise ValueError("it isn't a row with a step")
        fault = None if check is None else check(row)
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
        if name != "nonfinite" and not (value is None or isinstance(value, (int, float))):
            return f"{name} isn't a number"
    return None
