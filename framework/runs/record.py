"""`run.json`, the record of a run: what is written at its start and end, and how it is read. No torch here.

Ranks add their results with `RunDir.update_run`; `RunRecord` is what lists, comparisons and reports read.
"""

from __future__ import annotations

import os
import platform
import pwd
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from framework.config.find_run import is_run
from framework.config.overrides import key_of, search_path_override
from framework.config.saved import load_run, save_config
from framework.config.secrets import Secrets, masked_arguments, masked_override
from framework.config.topology import Topology
from framework.errors import ConfigError, RequestError, RunError
from framework.remote.place import display_place, is_copy
from framework.runs.segments import SEGMENTS, check_segments, kept_segments
from framework.system.files import FileFacts, content_damage, open_regular
from framework.system.formatting import display_path
from framework.system.hardware import cpu_count, visible_gpus
from framework.system.json_lines import is_finite_number, metrics_fault, read_lines
from framework.system.run_dir import RunDir, is_locked
from framework.system.shown_text import shown
from framework.system.versions import installed_versions

MISSING: Any = object()
"""What `RunRecord.value` returns for a name that the run doesn't have; None is a value."""

COLUMNS = ("run", "recipe", "status", "monitor", "best", "last", "seconds", "started", "overrides")

_DESCRIBES_A_ROW = {"step", "epoch", "time", "nonfinite"}
_PACKAGES = ("framework", "torch", "torchvision", "hydra-core", "omegaconf", "numpy")
_GIT_TIMEOUT_S = 5.0
_MAX_DIFF_CHARS = 1_000_000


# Writing


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """What a run is started with, for its record."""

    # The resolved configuration, as plain values.
    raw: Mapping[str, Any]
    # What was typed, without `resume`.
    overrides: Sequence[str]
    # The absolute places of `hydra.searchpath`.
    search_path: Sequence[str]
    # The arguments of python, with which the run can be started again.
    arguments: Sequence[str]
    topology: Topology
    # Pickled: the objects that a call from Python gave; None if there are none.
    objects: bytes | None = None
    # Of a run that branches off another one: that run, the step, and more.
    branch_of: Mapping[str, Any] | None = None


def record_start(run_dir: RunDir, start: RunStart) -> None:
    """Save the configuration, and record the command, code, versions and hardware; earlier starts go under `earlier`.

    Raises RunError if the run directory can't be written.
    """
    facts = _start_facts(start)
    before: dict[str, Any] = {}
    if run_dir.run_file.exists():
        before = run_dir.read_run()
        facts["earlier"] = _earlier_starts(before, Secrets(start.raw))
        facts["ended"] = None
    try:
        run_dir.logs.mkdir(exist_ok=True)
        if start.raw.get("resume") is not None:
            # The failure reports of the previous start go; its logs stay.
            for file in run_dir.path.glob("failure*.json"):
                file.unlink()
        objects = _save_objects(run_dir, start)
        texts = save_config(run_dir, raw={**start.raw, **objects.keys}, overrides=_saved_overrides(start))
        files = {name: FileFacts.of(text.encode()) for name, text in texts.items()}
        files |= objects.facts
        facts["files"] = {name: asdict(file_facts) for name, file_facts in files.items()}
        # What an edited file is compared with.
        facts["config"] = texts[run_dir.config_file.name]
        if before:
            facts[SEGMENTS] = kept_segments(before, facts)
        run_dir.update_run(facts)
    except OSError as error:
        raise RunError(
            f"The run directory {run_dir.path} can't be written: {error.strerror or error}.\n"
            "Make room, or choose another folder with path.outputs=FOLDER."
        ) from error


def record_end(run_dir: RunDir, *, status: str, late: Sequence[Mapping[str, Any]] = ()) -> None:
    """Record how the run ended. A full disk is only reported: the reason why it ended has yet to be printed.

    Nothing is recorded if the run directory is gone, which the ranks report.

    Args:
        late: Ranks that others waited for and that caught up.
    """
    facts = {"status": status, "ended": _now(), "late": [dict(rank) for rank in late]}
    try:
        run_dir.update_run(facts)
    except OSError as error:
        if run_dir.path.is_dir():
            print(f"{run_dir.run_file} can't be written: {error.strerror or error}.", file=sys.stderr, flush=True)


def _start_facts(start: RunStart) -> dict[str, Any]:
    secrets = Secrets(start.raw)
    command = shlex.join(["python", *masked_arguments(start.arguments)])
    facts = {
        "status": "running",
        "started": _now(),
        "process": {"pid": os.getpid(), "host": socket.gethostname(), "user": user_name()},
        "command": secrets.masked_text(command),
        **described(start.raw, secrets.masked_overrides(start.overrides)),
        "search_path": list(start.search_path),
        "tags": list(start.raw.get("tags") or ()),
        "topology": {**asdict(start.topology), "world_size": start.topology.world_size},
        **code_and_versions(),
        "hardware": {
            "host": socket.gethostname(),
            "platform": platform.platform(),
            "cpu_cores": cpu_count(),
            "gpus": [gpu.name for gpu in visible_gpus()],
        },
    }
    if start.raw.get("rerun") is not None:
        facts["rerun_of"] = start.raw["rerun"]
    if start.branch_of is not None:
        facts["branch_of"] = dict(start.branch_of)
    return facts


def code_and_versions() -> dict[str, Any]:
    """Return the present git state and the versions of Python and packages, as run.json has them."""
    return {
        "git": _git_state(),
        "versions": {"python": platform.python_version(), **installed_versions(_PACKAGES)},
    }


def described(config: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return what lists show of a configuration, for run.json: a thousand YAML files take seconds to load."""
    return {
        "job": config["job"],
        "recipe": config["recipe"],
        "monitor": config["checkpoint"]["monitor"],
        "mode": config["checkpoint"]["mode"],
        "overrides": list(overrides),
    }


def _earlier_starts(before: Mapping[str, Any], secrets: Secrets) -> list[dict[str, Any]]:
    """Return the starts of a resumed run. before: its record so far."""
    latest = {key: before.get(key) for key in ("status", "started", "ended", "command")}
    # Earlier versions recorded it as it was typed.
    latest["command"] = secrets.masked_text(str(before.get("command", "")))
    return [*(before.get("earlier") or []), latest]


def _saved_overrides(start: RunStart) -> list[str]:
    """Return the overrides with absolute search paths."""
    if not start.search_path:
        return list(start.overrides)
    overrides = [text for text in start.overrides if key_of(text) != "hydra.searchpath"]
    return [*overrides, search_path_override(start.search_path)]


@dataclass(frozen=True)
class _Objects:
    """The Python objects of a run: the configuration's key that names their files, and the files in its directory."""

    keys: Mapping[str, Any]
    facts: dict[str, FileFacts]


def _save_objects(run_dir: RunDir, start: RunStart) -> _Objects:
    """Write the Python objects of a call to the run directory."""
    files = list(start.raw.get("objects") or ())
    facts = {}
    for file in map(Path, files):
        # The objects of a rerun are in the original run.
        if file.parent == run_dir.path:
            # Earlier versions didn't record the files of objects; from now on they are recorded.
            facts[file.name] = run_dir.recorded_facts(file.name) or FileFacts.of(run_dir.read_unchanged(file))
    if start.objects is None:
        return _Objects({}, facts)

    number = len(list(run_dir.path.glob(run_dir.objects_file("*").name)))
    file = run_dir.objects_file(number)
    file.write_bytes(start.objects)
    facts[file.name] = FileFacts.of(start.objects)
    return _Objects({"objects": [*files, str(file)]}, facts)


def user_name() -> str:
    """Return the name of the user whose process this is, or the number if it has none."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def _git_state() -> dict[str, str] | None:
    """Return revision and uncommitted changes of the working directory's repository; None outside of one."""
    try:
        revision = _git("rev-parse", "HEAD").strip()
        return {"revision": revision, "diff": _git("diff", "HEAD")[:_MAX_DIFF_CHARS]}
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    result = subprocess.run(
        ["git", *arguments],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_GIT_TIMEOUT_S,
        check=True,
    )
    return result.stdout


# Reading

# The types of what `run.json` has.
_FACTS: Mapping[str, type] = {
    "status": str,
    "started": str,
    "ended": str,
    "recipe": str,
    "job": str,
    "monitor": str,
    "mode": str,
    "command": str,
    "rerun_of": str,
    "overrides": list,
    "earlier": list,
    "restarts": list,
    "git": dict,
    "versions": dict,
    "hardware": dict,
    "topology": dict,
    "results": dict,
    "modules": dict,
    "profile": dict,
    "segments": list,
    "branch_of": dict,
}
_REQUIRED = ("status", "started", "recipe", "job", "overrides")
_GIT: Mapping[str, type] = {"revision": str, "diff": str}
# What reading a record raises if somebody else has written it.
_WRONG_CONTENT = (RequestError, OSError, KeyError, TypeError, ValueError, AttributeError, OverflowError)


class DamagedRunError(ConfigError):
    """The records of a run can't be read, or aren't what a run records."""


@dataclass(frozen=True)
class BranchPoint:
    """Where a run branches off another one."""

    # The directory of the other run.
    run: Path
    # Its last step that is part of this run, too.
    step: int


@dataclass(frozen=True)
class RunRecord:
    """What a run directory says about its run."""

    run_dir: RunDir
    # The content of run.json, with what `described` returns.
    facts: Mapping[str, Any]

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """Return the content of config.yaml, secrets masked. Loading it takes a millisecond or two."""
        raw, _ = load_run(self.run_dir)
        return Secrets(raw).masked_config()

    @cached_property
    def run(self) -> str:
        return display_place(self.run_dir.path)

    @property
    def recipe(self) -> str:
        return str(self.facts["recipe"])

    @property
    def overrides(self) -> tuple[str, ...]:
        """Return what was typed, without the recipe, secrets masked."""
        return tuple(masked_override(text) for text in self.facts["overrides"] if key_of(text) != "recipe")

    @cached_property
    def status(self) -> str:
        """Return finished, stopped, failed, interrupted, running, or crashed: running, but no process is.

        A run that was fetched may be running on another machine.
        """
        status = str(self.facts["status"])
        if status == "running" and not is_locked(self.run_dir) and not is_copy(self.run_dir.path):
            return "crashed"
        return status

    @property
    def branch_point(self) -> BranchPoint | None:
        """Return where the run begins if it branches off another one; None if it doesn't."""
        facts = self.facts.get("branch_of")
        if facts is None:
            return None
        return BranchPoint(Path(facts["run"]), int(facts["step"]))

    @property
    def monitor(self) -> str | None:
        """Return the name of the metric that `best` and `last` are of."""
        monitor: str | None = self.facts.get("monitor")
        return monitor

    @property
    def mode(self) -> str:
        """Return `min` or `max`: which values of `monitor` are better."""
        return str(self.facts.get("mode") or "min")

    @property
    def started(self) -> datetime:
        """Return when it was last started, in local time."""
        return datetime.fromisoformat(self.facts["started"]).astimezone()

    @property
    def seconds(self) -> float | None:
        """Return how long it ran, over all its starts whose end is recorded; None if there are none."""
        durations = []
        for start in (*(self.facts.get("earlier") or []), self.facts):
            if start.get("ended"):
                durations.append(_seconds_between(start["started"], start["ended"]))
        if self.status == "running":
            now = datetime.now(timezone.utc).isoformat()
            durations.append(_seconds_between(self.facts["started"], now))
        if not durations:
            return None
        return sum(durations)

    @property
    def best(self) -> float | None:
        if self.monitor is None:
            return None
        return self.best_metrics.get(self.monitor)

    @property
    def last(self) -> float | None:
        if self.monitor is None:
            return None
        return self.last_metrics.get(self.monitor)

    @property
    def best_metrics(self) -> Mapping[str, float]:
        """Return the metrics of the best validation by `monitor`; empty if there is none."""
        return self._results_of("best").get("metrics") or self._validated.best

    @property
    def last_metrics(self) -> Mapping[str, float]:
        """Return the metrics of the last validation; empty if there is none."""
        return self._results_of("last").get("metrics") or self._validated.last

    @property
    def test_metrics(self) -> Mapping[str, float]:
        """Return the metrics of the test, or those of an evaluation."""
        results = self._results_of("test") or self._results
        metrics: Mapping[str, float] = results.get("metrics", {})
        return metrics

    @property
    def metrics(self) -> dict[str, float]:
        """Return the metrics of the best validation, or the last one if none is best, and of the test."""
        validated = self.best_metrics or self.last_metrics
        return {**validated, **self.test_metrics}

    @property
    def texts(self) -> dict[str, str]:
        """Return the tables of the last validation, the test or the evaluation by their names."""
        texts: dict[str, str] = {}
        for results in (self._results, self._results_of("last"), self._results_of("test")):
            texts |= results.get("texts", {})
        return texts

    def value(self, name: str) -> Any:
        """Return a column, one of `metrics`, or a key of the configuration; MISSING if there is none of that name."""
        if name in COLUMNS:
            return getattr(self, name)
        if name in self.metrics:
            return self.metrics[name]
        node: Any = self.config
        for part in name.split("."):
            if not isinstance(node, Mapping):
                return MISSING
            node = node.get(part, MISSING)
        return node

    @property
    def _results(self) -> Mapping[str, Any]:
        return self.facts.get("results") or {}

    def _results_of(self, part: str) -> Mapping[str, Any]:
        """Return the results of `best`, `last` or `test`; empty if there are none."""
        return self._results.get(part) or {}

    def rows(self, *, having: str | None = None) -> Iterator[dict[str, Any]]:
        """Yield the rows of metrics.jsonl, as `read_rows` does. The first time, say what can't be read."""
        return read_rows(self.run_dir, report=self._report_rows, having=having)

    def _report_rows(self, line: str) -> None:
        if self._reported:
            return
        self._reported.append(line)
        print_left_out(line)

    @cached_property
    def _reported(self) -> list[str]:
        """Return what was said of metrics.jsonl."""
        return []

    @cached_property
    def _validated(self) -> _Validated:
        """Return the metrics of the best and the last validation in metrics.jsonl, for a run without results."""
        name = self.monitor
        if name is None:
            return _Validated({}, {})
        rows = [row for row in self.rows(having=name) if row.get(name) is not None]
        if not rows:
            return _Validated({}, {})
        choose = max if self.mode == "max" else min
        best = choose(rows, key=lambda row: row[name])
        return _Validated(_metrics_of(best), _metrics_of(rows[-1]))


@dataclass(frozen=True)
class _Validated:
    """The metrics of two validations."""

    best: Mapping[str, float]
    last: Mapping[str, float]


def read_run(place: Path) -> RunRecord | None:
    """Return the record of a run directory; None if it isn't one, or its run has only just begun.

    Raises DamagedRunError if what is recorded of the run can't be read, or isn't what a run records.
    """
    run_dir = RunDir(place)
    has_record = os.path.lexists(run_dir.run_file)
    if not is_run(place):
        if has_record:
            raise DamagedRunError(f"{display_path(place)} is damaged: it lacks config.yaml or overrides.yaml.")
        return None
    if not has_record:
        if is_locked(run_dir):
            return None
        raise DamagedRunError(f"{display_path(place)} is damaged: it lacks run.json.")
    try:
        facts = run_dir.read_run()
        if "job" not in facts:
            facts = {**facts, **described(*load_run(run_dir))}
        _check_facts(facts)
        _check_config(run_dir)
        record = RunRecord(run_dir, facts)
        # Their texts may be no times, or times that can't be subtracted.
        _ = (record.started, record.seconds)
    except _WRONG_CONTENT as error:
        reason = error if isinstance(error, RequestError) else f"{run_dir.run_file.name} has {error}"
        raise DamagedRunError(f"{display_path(place)} is damaged: {reason}") from error
    return record


def _check_facts(facts: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError if anything that lists, comparisons and reports use has the wrong type."""
    for name, kind in _FACTS.items():
        is_optional = name not in _REQUIRED
        _check_kind(facts, name, kind, is_optional=is_optional)
    for start in facts.get("earlier") or []:
        for name in ("started", "ended"):
            _check_kind(start, name, str)
    check_segments(facts)
    if facts.get("branch_of") is not None:
        _check_kind(facts["branch_of"], "run", str, is_optional=False)
        _check_kind(facts["branch_of"], "step", int, is_optional=False)
    for override in facts["overrides"]:
        if not isinstance(override, str):
            raise TypeError(f"{override!r} among its overrides, which isn't a text")
    for name, kind in _GIT.items():
        _check_kind(facts.get("git") or {}, name, kind)

    results = facts.get("results") or {}
    for name in ("best", "last", "test"):
        _check_kind(results, name, dict)
    for part in (results, results.get("best"), results.get("last"), results.get("test")):
        _check_results(part or {})


def _check_results(part: Mapping[str, Any]) -> None:
    for name in ("metrics", "texts"):
        _check_kind(part, name, dict)
    for name, text in (part.get("texts") or {}).items():
        if not isinstance(text, str):
            raise TypeError(f"{text!r} as the text {name}")
    for name, value in (part.get("metrics") or {}).items():
        if not is_finite_number(value) and not isinstance(value, float):
            raise TypeError(f"a {name} that isn't a number")
    _check_kind(part, "steps", int)


def _check_kind(facts: Any, name: str, kind: type, *, is_optional: bool = True) -> None:
    """Raise TypeError unless the value of that name is of this kind; or, if it is optional, None or not there."""
    if not isinstance(facts, Mapping):
        raise TypeError(f"a {type(facts).__name__} in place of an object with {name}")
    value = facts.get(name)
    if value is None and is_optional:
        return
    if not isinstance(value, kind):
        raise TypeError(f"a {type(value).__name__} as {name}, in place of a {kind.__name__}")


def _check_config(run_dir: RunDir) -> None:
    """Raise RequestError if the saved configuration can't be read. It is parsed only if it isn't what the run wrote."""
    for file in (run_dir.config_file, run_dir.overrides_file):
        facts = run_dir.recorded_facts(file.name)
        if facts is None or content_damage(partial(open_regular, file), facts) is not None:
            load_run(run_dir)
            return


def read_rows(
    run_dir: RunDir, *, report: Callable[[str], object], having: str | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the readable rows of metrics.jsonl, only those with the metric `having` if that is given.

    Args:
        report: Is called once, with a line that says what can't be read, if there is anything.
    """
    path = run_dir.metrics_file
    if not os.path.lexists(path):
        return
    damaged = []
    try:
        for line in read_lines(path, check=metrics_fault, having=having):
            if line.row is None:
                damaged.append(line)
            elif having is None or having in line.row:
                yield line.row
    except OSError as error:
        report(f"{display_path(path)} can't be read: {error.strerror or error}.")
        return
    if damaged and not damaged[-1].text.endswith(b"\n") and is_locked(run_dir):
        # The run is writing that line.
        damaged.pop()
    if damaged:
        first = f"line {damaged[0].number} is damaged ({damaged[0].fault})"
        others = f", and so are {len(damaged) - 1} more" if len(damaged) > 1 else ""
        report(f"{display_path(path)}: {first}{others}. What is damaged is left out.")


def print_left_out(line: str) -> None:
    """Print to stderr what a list, comparison or report doesn't have because it can't be read."""
    print(shown(line), file=sys.stderr, flush=True)


def metric_names(row: Mapping[str, Any]) -> list[str]:
    """Return the names of the metrics in a row of metrics.jsonl."""
    return [name for name in row if name not in _DESCRIBES_A_ROW]


def _metrics_of(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: row[name] for name in metric_names(row) if row[name] is not None}


def _seconds_between(started: str, ended: str) -> float:
    return (datetime.fromisoformat(ended) - datetime.fromisoformat(started)).total_seconds()
