"""The list of runs: choosing, ordering and showing them. No torch here."""

from __future__ import annotations

import csv
import io
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any

from framework.config.nested import walk
from framework.config.suggest import did_you_mean, nearest
from framework.errors import ConfigError
from framework.remote.place import display_place
from framework.runs.record import COLUMNS, MISSING, RunRecord
from framework.system.columns import GAP, aligned, column_sizes, lines_below, table_width
from framework.system.formatting import format_count, format_duration, format_metric, terminal_width
from framework.system.shown_text import printable

_CONDITION = re.compile(r"([^<>=!]+)(!=|<=|>=|=|<|>)(.+)")
_COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_HEAD = ("run", "recipe", "status", "metric", "best", "last", "time", "started", "overrides")
# The columns of the table, and what goes on lines below if the terminal is too narrow for all.
_NARROW_COLUMNS = ("run", "status", "best", "last", "time")
_NARROW_BELOW = ("recipe", "started", "metric", "overrides")
_RIGHT_ALIGNED = ("best", "last", "time")
_SCORES = ("best", "last")
# Columns of the terminal. With fewer left, overrides go on a line of their own.
_MIN_OVERRIDES = 20


def matching(records: Sequence[RunRecord], conditions: str | None) -> list[RunRecord]:
    """Return the runs that meet all conditions. Raises ConfigError for a malformed one, or a name that no run has."""
    chosen = list(records)
    for text in (conditions or "").split():
        match = _CONDITION.fullmatch(text)
        if match is None:
            raise ConfigError(
                f"runs.filter={text}: must be NAME=VALUE, or have !=, <, <=, > or >= in place of =, such as "
                "status=failed or val/accuracy>0.9. Separate several by spaces."
            )
        name, sign, wanted = match.groups()
        _check_name(name, records, key="runs.filter")
        chosen = [record for record in chosen if _meets(record.value(name), sign, wanted, condition=text)]
    return chosen


def ordered(records: Sequence[RunRecord], name: str) -> list[RunRecord]:
    """Return the runs sorted by a column, metric or key; descending if the name begins with a minus.

    The columns `best` and `last` ascend from the worst to the best value, whether low or high ones are better. Runs
    without a value come last.
    """
    is_descending = name.startswith("-")
    name = name.removeprefix("-")
    _check_name(name, records, key="runs.sort")

    present = [record for record in records if not _is_absent(record.value(name))]
    absent = [record for record in records if _is_absent(record.value(name))]
    are_comparable = all(isinstance(record.value(name), (float, int, datetime)) for record in present)

    def sort_key(record: RunRecord) -> Any:
        value = record.value(name)
        if name in _SCORES and record.mode == "min":
            return -value
        return value if are_comparable else str(value)

    return sorted(present, key=sort_key, reverse=is_descending) + absent


def _meets(value: Any, sign: str, wanted: str, *, condition: str) -> bool:
    if _is_absent(value):
        return value is None and wanted == "null" and sign == "="
    number = _number(wanted)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and number is not None:
        return _COMPARE[sign](value, number)
    text = _typed(value)
    if sign not in ("=", "!="):
        raise ConfigError(f"runs.filter={condition}: {sign} is for numbers, and a run has {text} there.")
    return fnmatchcase(text, wanted) is (sign == "=")


def _check_name(name: str, records: Sequence[RunRecord], *, key: str) -> None:
    """Raise ConfigError for a name that no run has."""
    if not records or any(record.value(name) is not MISSING for record in records):
        return
    names = list(COLUMNS)
    for record in records:
        names += _names(record)
    hint = did_you_mean(nearest(name, dict.fromkeys(names)))
    raise ConfigError(
        f"{key}={name}: no run has a column, metric or key of that name.{hint}\nColumns: {', '.join(COLUMNS)}."
    )


def _names(record: RunRecord) -> list[str]:
    """Return the names of its metrics and the keys of its configuration."""
    keys = [key for key, _ in walk(record.config)]
    return [*record.best_metrics, *record.last_metrics, *record.test_metrics, *keys]


def _is_absent(value: Any) -> bool:
    is_nan = isinstance(value, float) and math.isnan(value)
    return value is MISSING or value is None or is_nan


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _typed(value: Any) -> str:
    """Return a value as it would be typed in a condition."""
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%dT%H:%M}"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (tuple, list)):
        return " ".join(map(str, value))
    return str(value)


def plain(record: RunRecord) -> dict[str, Any]:
    """Return a run as an object of `runs.format=json`."""
    columns = {name: getattr(record, name) for name in COLUMNS}
    columns["started"] = record.started.isoformat()
    columns["overrides"] = list(record.overrides)
    columns["metrics"] = record.metrics
    columns["branch_of"] = None
    point = record.branch_point
    if point is not None:
        columns["branch_of"] = {"run": display_place(point.run), "step": point.step}
    return columns


def csv_text(records: Sequence[RunRecord]) -> str:
    """Return a row for each run, with a column for each metric that one of them has."""
    rows = []
    for record in records:
        row = plain(record)
        metrics = row.pop("metrics")
        row["overrides"] = " ".join(row["overrides"])
        point = row.pop("branch_of")
        if point is not None:
            row["branch_of"] = f"{point['run']} step {point['step']}"
        rows.append(row | metrics)

    names = dict.fromkeys(COLUMNS)
    for row in rows:
        names |= dict.fromkeys(row)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(names), lineterminator="\n")
    writer.writerow({name: printable(name) for name in names})
    for row in rows:
        writer.writerow({name: csv_cell(value) for name, value in row.items()})
    return text.getvalue().removesuffix("\n")


def csv_cell(value: Any) -> Any:
    """Return a cell of a CSV file: of a text, without control characters."""
    if isinstance(value, str):
        return printable(value)
    return value


def list_text(
    records: Sequence[RunRecord], *, num_found: int, num_damaged: int, where: str, as_tree: bool = False
) -> str:
    """Return the table of the runs, and their number by status.

    Args:
        as_tree: Put the branches of a run below it.
        num_found: Before `runs.filter`.
        num_damaged: Further runs, which can't be read.
    """
    damaged = ""
    if num_damaged:
        damaged = f", and {format_count(num_damaged, 'damaged run')}"
    if not num_found:
        return f"No runs in {where}{damaged}"
    if not records:
        return f"None of the {format_count(num_found, 'run')} in {where} meets runs.filter{damaged}"

    statuses = Counter(record.status for record in records).most_common()
    counts = ", ".join(f"{count:,} {printable(status)}" for status, count in statuses)
    total = format_count(num_found, "run")
    if len(records) < num_found:
        total = f"{len(records):,} of {total}"
    names = {record.run: record.run for record in records}
    if as_tree:
        names = _tree(records)
        by_run = {record.run: record for record in records}
        records = [by_run[run] for run in names]
    lines = table_lines(records, width=terminal_width(), names=names)
    return "\n".join([*lines, "", f"{total} in {where}: {counts}{damaged}"])


def _tree(records: Sequence[RunRecord]) -> dict[str, str]:
    """Return the runs, each above its branches, and how each is named in the list."""
    by_place = {record.run_dir.path.resolve(): record for record in records}
    branches: dict[str, list[tuple[RunRecord, int]]] = {}
    roots = []
    for record in records:
        point = record.branch_point
        parent = None
        if point is not None:
            parent = by_place.get(point.run.resolve())
        if point is None or parent is None or parent is record:
            roots.append(record)
        else:
            branches.setdefault(parent.run, []).append((record, point.step))

    names = {}
    stack = [(record, record.run, 0) for record in reversed(roots)]
    while stack:
        record, name, depth = stack.pop()
        names[record.run] = name
        for branch, step in reversed(branches.get(record.run, [])):
            stack.append((branch, f"{'  ' * depth}└ {branch.run} after step {step:,}", depth + 1))
    # Records that somebody has edited may name each other.
    return names | {record.run: record.run for record in records if record.run not in names}


def table_lines(records: Sequence[RunRecord], *, width: int, names: Mapping[str, str]) -> list[str]:
    """Return a header and a line for each run. If `width` is too narrow, some columns go on lines below it.

    names: how each run is named in the table.
    """
    shared = _shared_overrides(records)
    rows = []
    for record in records:
        row = dict(zip(_HEAD, _cells(record, shared), strict=True))
        row["run"] = printable(names[record.run])
        rows.append(row)
    header = {name: name for name in _HEAD}
    sizes = column_sizes([header, *rows])

    fixed = {name: size for name, size in sizes.items() if name != "overrides"}
    if table_width(fixed) + len(GAP) + _MIN_OVERRIDES <= width:
        # The last column is cut off, not padded.
        wide = {**fixed, "overrides": 0}
        return [_clipped(aligned(row, wide, right=_RIGHT_ALIGNED), width) for row in (header, *rows)]

    columns = list(_NARROW_COLUMNS)
    below = list(_NARROW_BELOW)
    while len(columns) > 1 and table_width({name: sizes[name] for name in columns}) > width:
        below.insert(0, columns.pop())
    narrow = {name: sizes[name] for name in columns}
    lines = [aligned(header, narrow, right=_RIGHT_ALIGNED)]
    for row in rows:
        lines.append(aligned(row, narrow, right=_RIGHT_ALIGNED))
        lines += lines_below(_items_below(row, below), width=width)
    return lines


def _shared_overrides(records: Sequence[RunRecord]) -> set[str]:
    """Return the overrides that all of several runs have."""
    if len(records) < 2:
        return set()
    return set.intersection(*(set(record.overrides) for record in records))


def _cells(record: RunRecord, shared: Collection[str]) -> list[str]:
    """Return the cells under `_HEAD`.

    Args:
        shared: Overrides that all runs have, which come last.
    """
    cells = [
        record.run,
        record.recipe,
        record.status,
        record.monitor or "–",
        format_metric(record.best),
        format_metric(record.last),
        format_duration(record.seconds),
        f"{record.started:%Y-%m-%d %H:%M}",
        " ".join(sorted(record.overrides, key=lambda text: text in shared)),
    ]
    return [printable(cell) for cell in cells]


def _items_below(row: Mapping[str, str], names: Collection[str]) -> list[str]:
    """Return what doesn't fit beside the other columns. A number has its name before it."""
    items = []
    for name in names:
        if row[name]:
            items.append(f"{name} {row[name]}" if name in _RIGHT_ALIGNED else row[name])
    return items


def _clipped(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    return f"{line[: width - 1]}…"
