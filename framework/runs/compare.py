"""What differs between runs: configuration, code, versions, machine and metrics. No torch here."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from framework.config.nested import flatten, is_equal
from framework.config.renamed import with_present_names, without_removed
from framework.config.values import show
from framework.remote.place import display_place
from framework.runs.record import RunRecord
from framework.system.formatting import format_duration, format_metric, format_table, terminal_width
from framework.system.shown_text import printable

# By name, the value in each run; None for a run that has none.
Section = dict[str, list[Any]]
NO_CODE = "The code can't be compared: no run was started in a git repository."

# These keys say where a run comes from, not what it is.
_NOT_COMPARED = ("resume", "rerun")
_FILE_HEADER = re.compile(r"^diff --git a/.* b/(.*)$", re.MULTILINE)
_REVISION = re.compile(r"[0-9a-f]{40}")
_SHOWN_REVISION_CHARS = 12
_DIGEST_CHARS = 4


def compare(records: Sequence[RunRecord]) -> dict[str, Section]:
    """Return the sections run, metrics, configuration, code, versions and machine."""
    sections = {
        "run": _run(records),
        "metrics": metrics(records),
        "configuration": _differing([_compared_keys(record.config) for record in records]),
    }
    return sections | compare_origins([record.facts for record in records])


def compare_origins(facts: Sequence[Mapping[str, Any]]) -> dict[str, Section]:
    """Return the sections code, versions and machine, from the content of each `run.json`."""
    git_states = [run.get("git") or {} for run in facts]
    versions = [run.get("versions") or {} for run in facts]
    machines = [(run.get("hardware") or {}) | (run.get("topology") or {}) for run in facts]
    return {
        "code": _code(git_states),
        "versions": _differing(versions),
        "machine": _differing(machines),
    }


def metrics(records: Sequence[RunRecord]) -> Section:
    """Return every metric of the best and the last validation and of the test."""
    columns = []
    for record in records:
        column = {f"{name} (best)": value for name, value in record.best_metrics.items()}
        column |= {f"{name} (last)": value for name, value in record.last_metrics.items()}
        column |= record.test_metrics
        columns.append(column)
    section = {}
    for name in _names(columns):
        section[name] = [column.get(name) for column in columns]
    return section


def _run(records: Sequence[RunRecord]) -> Section:
    section: Section = {"status": [], "time": [], "steps": []}
    for record in records:
        results = record.facts.get("results") or {}
        section["status"].append(record.status)
        section["time"].append(format_duration(record.seconds))
        section["steps"].append(results.get("steps"))
    points = [_branch_text(record, records) for record in records]
    if any(points):
        section["branch of"] = points
    return section


def _branch_text(record: RunRecord, records: Sequence[RunRecord]) -> str | None:
    """Return the run that a run branches off, by its number if it is among `records`, and after which step."""
    point = record.branch_point
    if point is None:
        return None
    name = display_place(point.run)
    for number, other in enumerate(records, start=1):
        if other.run_dir.path.resolve() == point.run.resolve():
            name = str(number)
    return f"{name} after step {point.step:,}"


def _compared_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    present = without_removed(with_present_names(config))
    return {key: value for key, value in flatten(present).items() if key not in _NOT_COMPARED}


def _differing(columns: Sequence[Mapping[str, Any]]) -> Section:
    """Return the values that differ. A null is shown as the text `null`, so that it differs from a missing value."""
    section = {}
    for name in _names(columns):
        row = [_value_or_null(column, name) for column in columns]
        if not all(is_equal(value, row[0]) for value in row):
            section[name] = row
    return section


def _value_or_null(column: Mapping[str, Any], name: str) -> Any:
    """Return a value; the text `null` for None, and None if there is none."""
    if name not in column:
        return None
    value = column[name]
    if value is None:
        return "null"
    return value


def _code(git_states: Sequence[Mapping[str, str]]) -> Section:
    """Return the git revision, and the files whose uncommitted changes differ. A state is empty if it is unknown."""
    revisions = []
    for git in git_states:
        revisions.append({"revision": git["revision"]} if git else {})
    section = _differing(revisions)
    changes = [_changed_files(git.get("diff", "")) for git in git_states]
    for name in _names(changes):
        row = [files.get(name) for files in changes]
        if any(change != row[0] for change in row):
            section[f"uncommitted {name}"] = _summaries(row)
    return section


def _changed_files(diff: str) -> dict[str, str]:
    """Return the changes of each file in the output of `git diff`."""
    _, *parts = _FILE_HEADER.split(diff)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _summaries(changes: Sequence[str | None]) -> list[str | None]:
    """Return the lines added and removed by each change; None for a run without one."""
    counts: list[str | None] = []
    counts_with_digests: list[str | None] = []
    for change in changes:
        if change is None:
            counts.append(None)
            counts_with_digests.append(None)
        else:
            count = _count(change)
            digest = hashlib.sha256(change.encode()).hexdigest()[:_DIGEST_CHARS]
            counts.append(count)
            counts_with_digests.append(f"{count} ({digest})")
    # If different changes have as many lines, a digest tells them apart.
    if len(set(counts)) < len(set(changes)):
        return counts_with_digests
    return counts


def _count(change: str) -> str:
    body = change.partition("\n@@")[2]
    added = len(re.findall(r"^\+", body, re.MULTILINE))
    removed = len(re.findall(r"^-", body, re.MULTILINE))
    return f"+{added} -{removed}"


def _names(columns: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names in all columns, each once, in their order."""
    names: dict[str, None] = {}
    for column in columns:
        names |= dict.fromkeys(column)
    return list(names)


def render(records: Sequence[RunRecord], sections: Mapping[str, Section]) -> str:
    """Return the numbered runs, then a table with a column for each of them."""
    numbers = [str(number) for number in range(1, len(records) + 1)]
    lines = [f"  {number}  {printable(record.run)}" for number, record in zip(numbers, records, strict=True)]

    rows = [["", *numbers]]
    for title, section in sections.items():
        if section:
            rows.append([title])
        for name, values in section.items():
            rows.append([f"  {printable(name)}", *map(cell, values)])
    lines += ["", format_table(rows, width=terminal_width())]

    is_code_known = any(record.facts.get("git") for record in records)
    same = [title for title, section in sections.items() if not section]
    if not is_code_known:
        same.remove("code")
    if same:
        lines += ["", f"  The same: {', '.join(same)}"]
    if not is_code_known:
        lines += ["", f"  {NO_CODE}"]
    return "\n".join(lines)


def cell(value: Any) -> str:
    """Return a value for a table, a revision shortened, control characters as text; `–` for None."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return format_metric(value)
    text = printable(show(value))
    if _REVISION.fullmatch(text):
        return text[:_SHOWN_REVISION_CHARS]
    return text
