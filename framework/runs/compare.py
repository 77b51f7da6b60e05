"""What differs between runs: configuration, code, versions, machine and metrics. No torch here."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from framework.config.parse import flatten, show
from framework.runs.record import RunRecord
from framework.system.formatting import format_duration, format_metric, format_table, terminal_width
from framework.system.shown_text import printable

Section = dict[str, list[Any]]
"""Name → its value in each run; None for a run that has none."""
NO_CODE = "The code can't be compared: no run was started in a git repository."
_NOT_COMPARED = ("resume", "rerun")  # where a run comes from, not what it is
_FILE = re.compile(r"^diff --git a/.* b/(.*)$", re.MULTILINE)
_SHOWN_REVISION = 12  # characters


def compare(records: Sequence[RunRecord]) -> dict[str, Section]:
    """Return the sections described above."""
    return {
        "run": _run(records),
        "metrics": metrics(records),
        "configuration": _differing([_leaves(record.config) for record in records]),
        **compare_origins([record.facts for record in records]),
    }


def compare_origins(facts: Sequence[Mapping[str, Any]]) -> dict[str, Section]:
    """Return the sections code, versions and machine, from the content of each `run.json`."""
    machines = [{**each.get("hardware", {}), **each.get("topology", {})} for each in facts]
    return {
        "code": _code([each.get("git") or {} for each in facts]),
        "versions": _differing([each.get("versions", {}) for each in facts]),
        "machine": _differing(machines),
    }


def metrics(records: Sequence[RunRecord]) -> Section:
    """Return every metric of the best and the last validation and of the test."""
    columns = [
        {
            **{f"{name} (best)": value for name, value in record.best_metrics.items()},
            **{f"{name} (last)": value for name, value in record.last_metrics.items()},
            **record.test_metrics,
        }
        for record in records
    ]
    return {name: [column.get(name) for column in columns] for name in _names(columns)}


def _run(records: Sequence[RunRecord]) -> Section:
    return {
        "status": [record.status for record in records],
        "time": [format_duration(record.seconds) for record in records],
        "steps": [(record.facts.get("results") or {}).get("steps") for record in records],
    }


def _leaves(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in flatten(config).items() if key not in _NOT_COMPARED}


def _differing(columns: Sequence[Mapping[str, Any]]) -> Section:
    """Return the values that differ. A null is shown as the text `null`, so that it differs from a missing value."""
    rows = {
        name: [("null" if c[name] is None else c[name]) if name in c else None for c in columns]
        for name in _names(columns)
    }
    return {name: row for name, row in rows.items() if any(each != row[0] for each in row)}


def _code(found: Sequence[Mapping[str, str]]) -> Section:
    changed = [_changed_files(git.get("diff", "")) for git in found]
    files: Section = {}
    for name in _names(changed):
        texts = [each.get(name) for each in changed]
        if any(text != texts[0] for text in texts):
            counts = [None if text is None else _count(text) for text in texts]
            if len(set(counts)) < len(set(texts)):  # different changes of as many lines
                digests = [text and hashlib.sha256(text.encode()).hexdigest()[:4] for text in texts]
                counts = [text and f"{text} ({digest})" for text, digest in zip(counts, digests, strict=True)]
            files[f"uncommitted {name}"] = counts
    return {**_differing([{"revision": git["revision"]} if git else {} for git in found]), **files}


def _changed_files(diff: str) -> dict[str, str]:
    """Return the changes of each file in the output of `git diff`."""
    _, *parts = _FILE.split(diff)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _count(change: str) -> str:
    body = change.partition("\n@@")[2]
    added, removed = (len(re.findall(rf"^\{sign}", body, re.MULTILINE)) for sign in "+-")
    return f"+{added} -{removed}"


def _names(columns: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for column in columns for name in column))


def render(records: Sequence[RunRecord], found: Mapping[str, Section]) -> str:
    """Return the numbered runs, then a table with a column for each of them."""
    is_code_known = any(record.facts.get("git") for record in records)
    same = [name for name, section in found.items() if not section and (name != "code" or is_code_known)]
    rows: list[list[str]] = [["", *(str(number) for number, _ in enumerate(records, start=1))]]
    for title, section in found.items():
        if section:
            rows += [[title], *([f"  {printable(name)}", *map(cell, row)] for name, row in section.items())]
    legend = [f"  {number}  {printable(record.run)}" for number, record in enumerate(records, start=1)]
    lines = [*legend, "", format_table(rows, width=terminal_width())]
    if same:
        lines += ["", f"  The same: {', '.join(same)}"]
    if not is_code_known:
        lines += ["", f"  {NO_CODE}"]
    return "\n".join(lines)


def cell(value: Any) -> str:
    """Return a value for a table, a revision shortened, control characters as text; `–` for None."""
    if isinstance(value, float):
        return format_metric(value)
    text = "–" if value is None else printable(show(value))
    return text[:_SHOWN_REVISION] if re.fullmatch(r"[0-9a-f]{40}", text) else text
