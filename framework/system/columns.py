"""Tables that fit the terminal: what doesn't fit beside the other columns goes on lines below. Words stay whole."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence

GAP = "  "
NOTHING = "–"
"""The cell of a value that isn't known."""


def column_sizes(rows: Iterable[Mapping[str, str]]) -> dict[str, int]:
    """Return the size of the largest cell of each column. rows: cells by the names of their columns."""
    sizes: dict[str, int] = {}
    for row in rows:
        for name, cell in row.items():
            sizes[name] = max(len(cell), sizes.get(name, 0))
    return sizes


def table_width(sizes: Mapping[str, int]) -> int:
    """Return the width of a table with columns of these sizes."""
    return sum(sizes.values()) + len(GAP) * (len(sizes) - 1)


def aligned(row: Mapping[str, str], sizes: Mapping[str, int], *, right: Collection[str]) -> str:
    """Return the line of a row: its cells in columns of these sizes. right: the columns that are aligned right."""
    cells = []
    for name, size in sizes.items():
        align = str.rjust if name in right else str.ljust
        cells.append(align(row[name], size))
    return GAP.join(cells).rstrip()


def lines_below(items: Iterable[str], *, width: int) -> list[str]:
    """Return the indented lines of what doesn't fit beside the other columns; empty items are left out."""
    return textwrap.wrap(
        " · ".join(item for item in items if item),
        width,
        initial_indent="  ",
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def fitted_table(
    rows: Sequence[Mapping[str, str]], *, below: Mapping[str, str], right: Collection[str], width: int
) -> list[str]:
    """Return the lines of a table. If it is too wide, columns leave it one by one, until the others fit.

    Args:
        rows: cells by the names of their columns; the first row is the header.
        below: the columns that may leave, the first to leave first, and how their cells are written then: `{} steps`.
        right: the columns that are aligned right.
    """
    header, *others = rows
    sizes = column_sizes(rows)
    for name in below:
        if table_width(sizes) <= width:
            break
        sizes.pop(name, None)
    left_out = [name for name in header if name not in sizes]

    lines = [aligned(header, sizes, right=right)]
    for row in others:
        lines.append(aligned(row, sizes, right=right))
        known = [name for name in left_out if row[name] not in ("", NOTHING)]
        lines += lines_below([below[name].format(row[name]) for name in known], width=width)
    return lines
