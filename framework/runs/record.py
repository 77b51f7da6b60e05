"""Read run directories: for lists, comparisons and reports. No torch here."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any

from framework.config.saved import is_run, key_of, load_run
from framework.config.secrets import Secrets, masked_override
from framework.config.suggest import did_you_mean, nearest
from framework.errors import ConfigError, RequestError
from framework.system.formatting import display_path
from framework.system.json_lines import metrics_fault, read_lines
from framework.system.run_dir import RunDir, is_locked
from framework.system.shown_text import shown

MISSING: Any = object()
"""What `RunRecord.value` returns for a name that the run doesn't have; None is a value."""

COLUMNS = ("run", "recipe", "status", "monitor", "best", "last", "seconds", "started", "overrides")

_DESCRIBES_A_ROW = {"step", "epoch", "time", "nonfinite"}


@dataclass(frozen=True)
class RunRecord:
    """What a run directory says about its run."""

    run_dir: RunDir
    facts: Mapping[str, Any]  # run.json, with what `described` returns

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """Return the content of config.yaml, secrets masked. Loading it takes a millisecond or two."""
        return Secrets(load_run(self.run_dir)[0]).masked_config()

    @cached_property
    def run(self) -> str:
        return display_path(self.run_dir.path)

    @property
    def recipe(self) -> str:
        return str(self.facts["recipe"])

    @property
    def overrides(self) -> tuple[str, ...]:
        """Return what was typed, without the recipe, secrets masked."""
        return tuple(masked_override(text) for text in self.facts["overrides"] if key_of(text) != "recipe")

    @cached_property
    def status(self) -> str:
        """Return finished, stopped, failed, interrupted, running, or crashed: running, but no process is."""
        status = str(self.facts["status"])
        return "crashed" if status == "running" and not is_locked(self.run_dir) else status

    @property
    def monitor(self) -> str | None:
        """Return the name of the metric that `best` and `last` are of."""
        monitor: str | None = self.facts["monitor"]
        return monitor

    @property
    def started(self) -> datetime:
        """Return when it was last started, in local time."""
        return datetime.fromisoformat(self.facts["started"]).astimezone()

    @property
    def seconds(self) -> float | None:
        """Return how long it ran, over all its starts whose end is recorded; None if there are none."""
        starts = [*self.facts.get("earlier", []), self.facts]
        known = [_seconds(each["started"], each["ended"]) for each in starts if each.get("ended")]
        if self.status == "running":
            known.append(_seconds(self.facts["started"], datetime.now(timezone.utc).isoformat()))
        return sum(known) if known else None

    @property
    def best(self) -> float | None:
        return None if self.monitor is None else self.best_metrics.get(self.monitor)

    @property
    def last(self) -> float | None:
        return None if self.monitor is None else self.last_metrics.get(self.monitor)

    @property
    def best_metrics(self) -> Mapping[str, float]:
        """Return the metrics of the best validation by `monitor`; empty if there is none."""
        best = self._results.get("best") or {}
        return best.get("metrics") or self._validated[0]

    @property
    def last_metrics(self) -> Mapping[str, float]:
        """Return the metrics of the last validation; empty if there is none."""
        last = self._results.get("last") or {}
        return last.get("metrics") or self._validated[1]

    @property
    def test_metrics(self) -> Mapping[str, float]:
        """Return the metrics of the test, or those of an evaluation."""
        metrics: Mapping[str, float] = (self._results.get("test") or self._results).get("metrics", {})
        return metrics

    @property
    def metrics(self) -> dict[str, float]:
        """Return the metrics of the best validation, or the last one if none is best, and of the test."""
        return {**(self.best_metrics or self.last_metrics), **self.test_metrics}

    @property
    def texts(self) -> dict[str, str]:
        """Return the tables of the last validation, the test or the evaluation by their names."""
        parts = (self._results, self._results.get("last") or {}, self._results.get("test") or {})
        return {name: text for part in parts for name, text in part.get("texts", {}).items()}

    def value(self, name: str) -> Any:
        """Return a column, one of `metrics`, or a key of the configuration; MISSING if there is none of that name."""
        if name in COLUMNS:
            return getattr(self, name)
        if name in self.metrics:
            return self.metrics[name]
        node: Any = self.config
        for part in name.split("."):
            node = node.get(part, MISSING) if isinstance(node, Mapping) else MISSING
        return node

    @property
    def _results(self) -> Mapping[str, Any]:
        return self.facts.get("results") or {}

    @cached_property
    def _validated(self) -> tuple[Mapping[str, float], Mapping[str, float]]:
        """Return the metrics of the best and the last validation in metrics.jsonl, for a run without results."""
        name, sign = self.monitor, -1 if self.facts["mode"] == "max" else 1
        if name is None:
            return {}, {}
        found = [row for row in read_rows(self.run_dir, having=name) if row.get(name) is not None]
        if not found:
            return {}, {}
        best = min(found, key=lambda row: sign * row[name])
        return _metrics(best), _metrics(found[-1])


def described(config: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return what lists show of a configuration, for run.json: a thousand YAML files take seconds to load."""
    checkpoint = config["checkpoint"]
    return {
        **{key: config[key] for key in ("job", "recipe")},
        **{key: checkpoint[key] for key in ("monitor", "mode")},
        "overrides": list(overrides),
    }


def read_rows(run_dir: RunDir, *, having: str | None = None, warns: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the readable rows of metrics.jsonl, only those with the metric `having` if that is given.

    warns: about damaged lines that are left out.
    """
    if not run_dir.metrics_file.exists():
        return
    try:
        # The last line may be half written.
        for line in read_lines(run_dir.metrics_file, check=metrics_fault, having=having):
            if line.row is None:
                if warns:
                    warnings.warn(f"{run_dir.metrics_file}: line {line.number} is damaged ({line.fault})", stacklevel=3)
            elif having is None or having in line.row:
                yield line.row
    except OSError:  # it isn't a file that a run has written
        return


def metric_names(row: Mapping[str, Any]) -> list[str]:
    """Return the names of the metrics in a row of metrics.jsonl."""
    return [name for name in row if name not in _DESCRIBES_A_ROW]


def find_runs(folder: Path) -> list[RunRecord]:
    """Return the trainings below `folder`, of recipes and of sweeps; not those that job=parity made for itself."""
    found, folders, seen = [], [folder], {folder.resolve()}  # symlinks may lead to the same folder again
    while folders:
        with_runs = folders.pop()
        for place in sorted(with_runs.iterdir(), key=_symlinks_last) if with_runs.is_dir() else ():
            if place.name.startswith(".") or place.name == "parity" or not place.is_dir():
                continue
            if (real := place.resolve()) in seen:
                continue
            seen.add(real)
            record = read_run(place)
            if record is None:
                folders.append(place)
            elif record.facts["job"] == "train":
                found.append(record)
    return found


def _symlinks_last(place: Path) -> tuple[bool, Path]:
    return place.is_symlink(), place


def named_runs(paths: Sequence[str]) -> list[RunRecord]:
    """Return the runs in `paths`: run directories, and folders of them.

    Raises ConfigError for a path that is neither a run nor a folder with runs.
    """
    found: list[RunRecord] = []
    for text in paths:
        path = Path(text).expanduser().absolute()
        record = read_run(path)
        if record is None and os.path.lexists(path / "run.json") and is_run(path):
            raise ConfigError(f"runs={text}: the record of this run is damaged. Restore its run.json from a copy.")
        records = find_runs(path) if record is None else [record]
        if not records:
            beside = [display_path(each) for each in path.parent.iterdir()] if path.parent.is_dir() else []
            hint = "" if path.is_dir() else did_you_mean(nearest(display_path(path), beside))
            raise ConfigError(f"runs={text}: neither a run directory nor a folder with runs.{hint}")
        found += records
    return found


def read_run(place: Path) -> RunRecord | None:
    """Return the record of a run directory; None if it isn't one, or its run has only just begun.

    None as well, after a line on stderr, if what is recorded of the run is damaged.
    """
    run_dir = RunDir(place)
    if not is_run(place) or not os.path.lexists(run_dir.run_file):
        return None
    try:
        facts = run_dir.read_run()
        if "job" not in facts:
            facts = {**facts, **described(*load_run(run_dir))}
        _check_facts(facts)
    except (RequestError, KeyError, TypeError, ValueError, AttributeError) as error:
        reason = error if isinstance(error, RequestError) else f"{run_dir.run_file} is damaged ({error!r})"
        print(shown(f"{display_path(place)} is left out: {reason}"), file=sys.stderr, flush=True)
        return None
    return RunRecord(run_dir, facts)


def _check_facts(facts: Mapping[str, Any]) -> None:
    """Raise an exception of some class if anything that a `RunRecord` uses has the wrong type."""
    for start in (facts, *facts.get("earlier", [])):
        for time in (start.get("started"), start.get("ended")):
            if time is not None:
                datetime.fromisoformat(time)
    names = ("status", "recipe", "job", "monitor")
    texts = [*(facts[name] for name in names if facts.get(name) is not None), *facts.get("overrides", [])]
    results = facts.get("results") or {}
    parts = [results, *(results.get(name) or {} for name in ("best", "last", "test"))]
    for part in parts:
        texts += part.get("texts", {}).values()
        for value in part.get("metrics", {}).values():
            if not isinstance(value, (int, float)):
                raise TypeError(f"{value!r} isn't a number")
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"{text!r} isn't a text")


def _metrics(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: row[name] for name in metric_names(row) if row[name] is not None}


def _seconds(started: str, ended: str) -> float:
    return (datetime.fromisoformat(ended) - datetime.fromisoformat(started)).total_seconds()
