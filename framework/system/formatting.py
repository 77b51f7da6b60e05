"""Format sizes, rates, times and counts for people: the same in every message, table and log."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

_DECIMAL = ("", "k", "M", "G", "T", "P")
_BINARY = ("", "Ki", "Mi", "Gi", "Ti")


def format_bytes(size_bytes: float) -> str:
    """Return three digits and a decimal unit: `660 B`, `4.80 MB`."""
    return _decimal(size_bytes, "B")


def format_rate(per_s: float, unit: str = "B/s") -> str:
    """Return `12.3 MB/s`, `1.25 GB/s`; with another unit, `1.25 GFLOP/s`."""
    return _decimal(per_s, unit)


def _decimal(value: float, unit: str) -> str:
    """Return the value with three digits and a decimal prefix of the unit."""
    power = 0
    # What would be rounded to 1000 gets the next prefix.
    while value >= 999.5 and power < len(_DECIMAL) - 1:
        value /= 1000
        power += 1
    if power == 0 or value >= 99.95:
        digits = 0
    elif value >= 9.995:
        digits = 1
    else:
        digits = 2
    return f"{value:.{digits}f} {_DECIMAL[power]}{unit}"


def format_binary_bytes(size_bytes: float) -> str:
    """Return `4 B`, `64 KiB`, `24.9 GiB`, for buffers whose sizes are powers of two."""
    size = float(size_bytes)
    power = 0
    while size >= 1024 and power < len(_BINARY) - 1:
        size /= 1024
        power += 1
    digits = 0 if power == 0 or size.is_integer() else 1
    return f"{size:.{digits}f} {_BINARY[power]}B"


def format_seconds(seconds: float) -> str:
    """Return a measured time: `52 µs`, `1.4 ms`, `12.3 s`; negative ones keep their sign."""
    if abs(seconds) >= 1000:
        return f"{seconds:,.0f} s"
    if abs(seconds) >= 1:
        return f"{seconds:.3g} s"
    if abs(seconds) >= 1e-3:
        return f"{seconds / 1e-3:.3g} ms"
    return f"{seconds * 1e6:.0f} µs"


def format_count(number: int, one: str, many: str | None = None) -> str:
    """Return `1 rank`, `2 ranks`; `many` is for plurals that don't end in s."""
    if number == 1:
        noun = one
    else:
        noun = many or f"{one}s"
    return f"{number:,} {noun}"


def format_numbers(numbers: Iterable[int], *, max_spans: int) -> str:
    """Return `3` or `0–2, 5`; after `max_spans` numbers or spans of them, ` and more`."""
    # First and last of each sequence without a gap.
    spans: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))

    texts = []
    for first, last in spans[:max_spans]:
        texts.append(str(first) if first == last else f"{first}–{last}")
    text = ", ".join(texts)
    if len(spans) > max_spans:
        text += " and more"
    return text


def format_table(rows: Sequence[Sequence[str]], *, width: int = 10_000) -> str:
    """Return the rows with aligned columns, indented by two spaces. Only cells beyond `width` are wrapped."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table

    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(max(map(len, rows), default=0)):
        table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    # In a notebook, rich would show what it prints, captured or not.
    console = Console(width=width, color_system=None, markup=False, emoji=False, highlight=False, force_jupyter=False)
    with console.capture() as captured:
        console.print(Padding(table, (0, 0, 0, 2)))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def format_facts(facts: Iterable[tuple[str, str]]) -> str:
    """Return one indented line for each name and its text."""
    return "\n".join(f"  {name:<12} {text}" for name, text in facts)


def terminal_width() -> int:
    """Return the columns of the terminal; for a file or pipe, more than any line has."""
    return shutil.get_terminal_size((10_000, 0)).columns


def format_metric(value: float | None) -> str:
    """Return four digits; `–` for None."""
    return "–" if value is None else f"{value:.4g}"


def format_duration(seconds: float | None) -> str:
    """Return hours, minutes and seconds, as in `0:01:30` and `49:05:00`; `–` for None."""
    if seconds is None:
        return "–"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


def display_path(path: Path) -> str:
    """Return the path relative to the working directory if it lies below it, else as it is."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
