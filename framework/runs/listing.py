"""The list of runs: choosing, ordering and showing them. No torch here."""

from __future__ import annotations

import csv
import json
import operator
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any

from framework.config.parse import walk
from framework.config.suggest import did_you_mean, nearest
from framework.errors import ConfigError
from framework.runs.record import COLUMNS, MISSING, RunRecord
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
_TO_THE_RIGHT = ("best", "last", "time")
_MIN_OVERRIDES = 20  # columns of the terminal; with fewer left, overrides go on a line of their own
_WORDS: Any = {
    **{"initial_indent": "  ", "subsequent_indent": "    "},
    **{"break_long_words": False, "break_on_hyphens": False},
}


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
    """Return the runs sorted by a column, metric or key; descending if the name begins with a minus."""
    is_reversed, name = name.startswith("-"), name.removeprefix("-")
    _check_name(name, records, key="runs.sort")
    values = [record.value(name) for record in records]
    is_text = not all(isinstance(value, (float, int, datetime)) or _is_absent(value) for value in values)
    pairs = [(str(value) if is_text else value, record) for value, record in zip(values, records, strict=True)]
    there = [pair for pair, value in zip(pairs, values, strict=True) if not _is_absent(value)]
    absent = [record for value, record in zip(values, records, strict=True) if _is_absent(value)]
    return [*(record for _, record in sorted(there, key=lambda pair: pair[0], reverse=is_reversed)), *absent]


def _meets(value: Any, sign: str, wanted: str, *, condition: str) -> bool:
    if _is_absent(value):
        return value is None and wanted == "null" and sign == "="
    number = _number(wanted)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and number is not None:
        return _COMPARE[sign](value, number)
    if sign not in ("=", "!="):
        raise ConfigError(f"runs.filter={condition}: {sign} is for numbers, and a run has {_shown(value)} there.")
    return fnmatchcase(_shown(value), wanted) is (sign == "=")


def _check_name(name: str, records: Sequence[RunRecord], *, key: str) -> None:
    if not records or any(record.value(name) is not MISSING for record in records):
        return
    names = [*COLUMNS, *dict.fromkeys(each for record in records for each in _names(record))]
    raise ConfigError(
        f"{key}={name}: no run has a column, metric or key of that name.{did_you_mean(nearest(name, names))}\n"
        f"Columns: {', '.join(COLUMNS)}."
    )


def _names(record: RunRecord) -> Iterable[str]:
    return [*record.best_metrics, *record.last_metrics, *record.test_metrics, *(key for key, _ in walk(record.config))]


def _is_absent(value: Any) -> bool:
    return value is MISSING or value is None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _shown(value: Any) -> str:
    """Return a value as it would be typed in a condition."""
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%dT%H:%M}"
    if isinstance(value, bool):
        return str(value).lower()
    return " ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def plain(record: RunRecord) -> dict[str, Any]:
    return {
        **{name: getattr(record, name) for name in COLUMNS},
        "started": record.started.isoformat(),
        "overrides": list(record.overrides),
        "metrics": record.metrics,
    }


def print_csv(records: Sequence[RunRecord]) -> None:
    rows = [plain(record) for record in records]
    metrics = list(dict.fromkeys(name for row in rows for name in row["metrics"]))
    writer = csv.DictWriter(sys.stdout, [*COLUMNS, *metrics], extrasaction="ignore", lineterminator="\n")
    writer.writerow({name: printable(name) for name in (*COLUMNS, *metrics)})
    for row in rows:
        cells = {**row, **row["metrics"], "overrides": " ".join(row["overrides"])}
        writer.writerow({name: csv_cell(value) for name, value in cells.items()})
    sys.stdout.flush()


def json_text(content: Any) -> str:
    """Return JSON in which every control character is escaped; `json` itself leaves DEL."""
    return json.dumps(content, indent=2).replace("\x7f", "\\u007f")


def csv_cell(value: Any) -> Any:
    """Return a cell of a CSV file: of a text, without control characters."""
    return printable(value) if isinstance(value, str) else value


def list_text(records: Sequence[RunRecord], *, num_found: int, where: str) -> str:
    if not num_found:
        return f"No runs in {where}"
    if not records:
        return f"None of the {format_count(num_found, 'run')} in {where} meets runs.filter"
    by_status = Counter(record.status for record in records)
    counts = ", ".join(f"{number:,} {printable(status)}" for status, number in by_status.most_common())
    left_out = f" of {num_found:,}" if len(records) < num_found else ""
    total = f"{len(records):,}{left_out} {'run' if num_found == 1 else 'runs'} in {where}: {counts}"
    return "\n".join([*table_lines(records, width=terminal_width()), "", total])


def table_lines(records: Sequence[RunRecord], *, width: int) -> list[str]:
    """Return a header and a line for each run. If `width` is too narrow, some columns go on lines below it."""
    shared = set.intersection(*(set(record.overrides) for record in records)) if len(records) > 1 else set()
    rows = [dict(zip(_HEAD, _cells(record, shared), strict=True)) for record in records]
    sizes = {name: max(len(name), *(len(row[name]) for row in rows)) for name in _HEAD[:-1]}
    if sum(sizes.values()) + 2 * len(sizes) + _MIN_OVERRIDES <= width:
        header = {name: name for name in _HEAD}
        return [_clipped(_line(row, sizes, row["overrides"]), width) for row in (header, *rows)]
    columns = ["run", "status", "best", "last", "time"]
    below = ["recipe", "started", "metric", "overrides"]
    while len(columns) > 1 and sum(sizes[name] for name in columns) + 2 * (len(columns) - 1) > width:
        below.insert(0, columns.pop())
    short = {name: sizes[name] for name in columns}
    lines = [_line({name: name for name in _HEAD}, short)]
    for row in rows:
        more = [f"{name} {row[name]}" if name in _TO_THE_RIGHT else row[name] for name in below if row[name]]
        lines += [_line(row, short), *textwrap.wrap(" · ".join(more), width, **_WORDS)]
    return lines


def _cells(record: RunRecord, shared: Collection[str]) -> list[str]:
    """Return the cells under `_HEAD`. shared: overrides that all runs have, which come last."""
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


def _line(row: Mapping[str, str], sizes: Mapping[str, int], rest: str = "") -> str:
    cells = [row[name].rjust(size) if name in _TO_THE_RIGHT else row[name].ljust(size) for name, size in sizes.items()]
    return "  ".join([*cells, rest]).rstrip()


def _clipped(line: str, width: int) -> str:
    return line if len(line) <= width else f"{line[: width - 1]}…"
