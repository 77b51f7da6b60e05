"""The trials of a sweep as a table for the terminal, as `results.csv`, and the commands for the best one."""

from __future__ import annotations

import csv
import io
import math
import os
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from framework.config.overrides import key_of, outputs_arguments, path_argument
from framework.config.secrets import masked_override
from framework.runs.listing import csv_cell
from framework.sweeps.differences import LEVEL
from framework.sweeps.ranking import Row, best_trial
from framework.sweeps.results import FINISHED, TrialResult
from framework.system.columns import NOTHING, fitted_table
from framework.system.formatting import display_path, format_count, format_facts, format_metric, format_numbers
from framework.system.run_dir import RunDir
from framework.system.shown_text import printable

_RANK = "#"
_TIED = "≈"
_CHANGED = "*"
_NO_BREAK = "\u00a0"
_RIGHT_ALIGNED = ("n", "steps", "s")
# Numbers of trials, or spans of them, in one cell.
_MAX_SPANS = 4
# Digits after the point of a mean. Those of smaller or larger numbers are written with an exponent.
_MAX_DECIMALS = 6
_MAX_PLAIN = 1e6


def table_text(rows: Sequence[Row], *, monitor: str | None, over: Collection[str], width: int) -> str:
    """Return the table, what its marks mean, and the number of trials by status.

    Args:
        rows: as `ranked_rows` returns them.
        monitor: the name of the metric that the scores are of; None if they aren't of one.
        over: the keys of `sweep.over`.
        width: of the terminal. Columns that don't fit go on lines below.
    """
    has_means = any(len(row.trials) > 1 for row in rows)
    title = f"{'mean' if has_means else 'best'} {printable(monitor or '')}".rstrip()
    labels = distinguishing([row.overrides for row in rows])
    cells = [_header(title, has_means=has_means)]
    for row, label in zip(rows, labels, strict=True):
        cells.append(_cells(row, label=label, title=title, has_means=has_means))

    below = {
        "overrides": "{}",
        "s": f"{{}}{_NO_BREAK}s",
        "steps": f"{{}}{_NO_BREAK}steps",
        "status": "{}",
        "n": f"n{_NO_BREAK}={_NO_BREAK}{{}}",
        title: "{}",
    }
    lines = fitted_table(cells, below=below, right=_RIGHT_ALIGNED, width=width)
    trials = [trial for row in rows for trial in row.trials]
    lines.append("")
    for note in (*_notes(rows, monitor=monitor, over=over), _counts(trials)):
        lines += textwrap.wrap(note, width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


def best_text(rows: Sequence[Row], *, mode: str) -> str:
    """Return the best trial, and the commands that train it again and evaluate it; "" if none has finished.

    Its run must be a training. rows, mode: as for `ranked_rows`.
    """
    trial = best_trial(rows, mode=mode)
    if trial is None:
        return ""
    others = [each.overrides for row in rows for each in row.trials if each is not trial]
    label = distinguishing([trial.overrides, *others])[0]
    path = display_path(trial.run)
    outputs = outputs_arguments(trial.overrides)
    again = " ".join(["python -m framework", path_argument("rerun", path), *outputs])
    facts = [("best", f"trial {trial.number}: {label}"), ("train again", again)]
    checkpoint = RunDir(trial.run).checkpoints / "best"
    if os.path.isdir(checkpoint):  # noqa: PTH112  # it raises nothing
        place = path_argument("checkpoint.path", display_path(checkpoint))
        facts.append(("evaluate", " ".join(["python -m framework job=eval", place, *outputs])))
    return printable(format_facts(facts), multiline=True)


def csv_text(results: Sequence[TrialResult], *, monitor: str | None) -> str:
    """Return the content of results.csv: a line for each trial, with a column for each key that the sweep varies."""
    keys = _varied_keys([result.overrides for result in results])
    names = ["trial", *keys, "status", "cause", monitor or "score", "step", "seconds", "code_changed", "run"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([printable(name) for name in names])
    for result in results:
        values = [_value_of(key, result.overrides) for key in keys]
        outcome = [result.status, result.cause, result.score, result.step, result.seconds]
        code_changed = str(result.code_changed).lower()
        cells = [result.number, *values, *outcome, code_changed, display_path(result.run)]
        writer.writerow([csv_cell(cell) for cell in cells])
    return text.getvalue()


# Overrides


def distinguishing(overrides: Sequence[Sequence[str]]) -> list[str]:
    """Return for each trial the overrides that not all trials have, as one text."""
    common: set[str] = set()
    if len(overrides) > 1:
        common = set.intersection(*map(set, overrides))
    labels = []
    for typed in overrides:
        labels.append(" ".join(masked_override(text) for text in typed if text not in common))
    return labels


def _varied_keys(overrides: Sequence[Sequence[str]]) -> list[str]:
    """Return the keys whose values differ between trials, in the order in which they were typed."""
    keys: dict[str, None] = {}
    for typed in overrides:
        keys |= dict.fromkeys(map(key_of, typed))
    return [key for key in keys if len({_value_of(key, typed) for typed in overrides}) > 1]


def _value_of(key: str, overrides: Iterable[str]) -> str | None:
    """Return the value of a key, the last one that was typed; None if there is none, `~` if the key was removed."""
    value = None
    for text in overrides:
        if key_of(text) == key:
            value = "~" if text.startswith("~") else masked_override(text).partition("=")[2]
    return value


# The table


def _header(title: str, *, has_means: bool) -> dict[str, str]:
    names = [_RANK, "trial", "overrides", "status", title, "n", "steps", "s"]
    header = {name: name for name in names}
    if has_means:
        header["trial"] = "trials"
    else:
        del header["n"]
    return header


def _cells(row: Row, *, label: str, title: str, has_means: bool) -> dict[str, str]:
    """Return the cells of a row, in the order of `_header`."""
    cells = {
        _RANK: _rank(row),
        "trial": _numbers(row),
        "overrides": printable(label),
        "status": printable(_status(row.trials)),
        title: _score(row),
    }
    if has_means:
        cells["n"] = str(row.n)
    cells["steps"] = _mean_of([trial.steps for trial in row.trials], digits=0)
    cells["s"] = _mean_of([trial.seconds for trial in row.trials], digits=1)
    return cells


def _rank(row: Row) -> str:
    if row.rank is None:
        return NOTHING
    return f"{row.rank} {_TIED}" if row.is_tied else str(row.rank)


def _numbers(row: Row) -> str:
    numbers = format_numbers([trial.number for trial in row.trials], max_spans=_MAX_SPANS)
    is_changed = any(trial.code_changed for trial in row.trials)
    return f"{numbers} {_CHANGED}" if is_changed else numbers


def _status(trials: Sequence[TrialResult]) -> str:
    """Return `finished`, `failed: out of memory`; of a row whose trials differ, `3 finished, 1 failed: NaN loss`."""
    counts: Counter[str] = Counter()
    for trial in trials:
        cause = f": {trial.cause}" if trial.cause else ""
        counts[f"{trial.status}{cause}"] += 1
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{count} {status}" for status, count in counts.most_common())


def _score(row: Row) -> str:
    """Return the mean with its interval; of a single trial, its best value so far."""
    if row.mean is None:
        return format_metric(row.trials[0].score) if len(row.trials) == 1 else NOTHING
    if row.half_width is None or not math.isfinite(row.half_width):
        return format_metric(row.mean)
    return _with_interval(row.mean, row.half_width)


def _with_interval(mean: float, half_width: float) -> str:
    """Return `0.9123 ± 0.0045`: two digits of the interval, and as many decimals of the mean."""
    decimals = 0
    if half_width > 0:
        decimals = max(0, 1 - math.floor(math.log10(half_width)))
    if decimals > _MAX_DECIMALS or abs(mean) >= _MAX_PLAIN or half_width >= _MAX_PLAIN or half_width == 0:
        return f"{mean:.4g} ± {half_width:.2g}"
    return f"{mean:.{decimals}f} ± {half_width:.{decimals}f}"


def _mean_of(values: Sequence[float | None], *, digits: int) -> str:
    """Return the mean of those values that are known; `–` if none is."""
    known = [value for value in values if value is not None]
    if not known:
        return NOTHING
    return f"{sum(known) / len(known):,.{digits}f}"


def _notes(rows: Sequence[Row], *, monitor: str | None, over: Collection[str]) -> list[str]:
    """Return what the marks in the table mean, and why rows have no rank."""
    notes = []
    unranked = [row for row in rows if row.rank is None and row.n > 0]
    if unranked and monitor is None:
        notes.append("not ranked: the trials don't have the same checkpoint.monitor and checkpoint.mode")
    elif unranked:
        notes.append(f"not ranked: {format_count(len(unranked), 'row')} with fewer finished trials than the others")
    trials = [trial for row in rows for trial in row.trials]
    has_trained = any(trial.status == FINISHED and trial.steps is not None for trial in trials)
    if has_trained and monitor is None and not unranked:
        notes.append("not compared: checkpoint.monitor=null. Set it to a metric such as val/loss, with checkpoint.mode")
    if any(row.half_width is not None for row in rows):
        notes.append("±: the 95 % interval of the mean (Student's t)")
    if any(row.is_tied for row in rows):
        pairs = " and ".join(over)
        level = f"{LEVEL * 100:.0f} %"
        notes.append(f"{_TIED}: within noise of the best (t-tests paired by {pairs}, for all rows together at {level})")
    if any(trial.code_changed for trial in trials):
        notes.append(f"{_CHANGED}: trained with other code than the first trial")
    return notes


def _counts(trials: Sequence[TrialResult]) -> str:
    """Return `24 trials: 20 finished, 3 waiting, 1 failed`."""
    statuses = Counter(trial.status for trial in trials)
    counts = ", ".join(f"{count:,} {printable(status)}" for status, count in statuses.most_common())
    return f"{format_count(len(trials), 'trial')}: {counts}"
