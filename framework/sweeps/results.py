"""What the trials of a sweep gave, read from their folders: at any moment, by anybody who can read them."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from framework.monitoring.failure import OUT_OF_MEMORY, FailureKind, RankFailure
from framework.monitoring.report import FailureReport
from framework.runs.record import DamagedRunError, RunRecord, read_run
from framework.sweeps.folder import SweepFolder, Trial
from framework.system.files import read_text
from framework.system.run_dir import RunDir, is_locked, read_object

FINISHED = "finished"
REFUSED = "refused"
"""The status of a trial that could not be started."""

# `ZeroDivisionError: division by zero`
_EXCEPTION_NAME = re.compile(r"\w{1,60}(?=:|$)")
# What `framework.training.meter.bad_loss` says.
_BAD_LOSS = re.compile(r"The training loss is (nan|inf|-inf|not finite) since step")
# By what it says.
_BAD_LOSSES = {
    "nan": "NaN loss",
    "inf": "infinite loss",
    "-inf": "infinite loss",
    "not finite": "NaN or infinite loss",
}
# What `framework.training.meter.bad_weights` says.
_BAD_WEIGHTS = re.compile(r"The weights are no longer finite after step")
# What the disk says, and what `framework.engine.train` says before the first step.
_DISK_FULL = re.compile(r"No space left on device|Disk quota exceeded|There is no room for a checkpoint")
# What reading a report raises if somebody else has written it.
_WRONG_CONTENT = (KeyError, TypeError, ValueError, AttributeError)


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """How a trial went so far."""

    number: int
    # Those of the command that would run it alone.
    overrides: tuple[str, ...]
    # That of its run; or waiting: it has no directory yet; or damaged: its records can't be read; or REFUSED.
    status: str
    # The run directory, which may not exist yet.
    run: Path
    # The best value of the monitored metric so far, and the step that it was reached in.
    score: float | None = None
    step: int | None = None
    # Steps and epochs done, once training has ended.
    steps: int | None = None
    epochs: int | None = None
    # Over all its starts.
    seconds: float | None = None
    # Why it failed or was refused, in a few words; None if it wasn't, or nothing says why.
    cause: str | None = None
    # It was trained with other code than an earlier trial.
    code_changed: bool = False

    @property
    def final_score(self) -> float | None:
        """Return the score that trials are compared by: that of a finished one. NaN is none."""
        if self.status != FINISHED or self.score is None:
            return None
        return self.score if math.isfinite(self.score) else None


def read_results(folder: SweepFolder, trials: Sequence[Trial]) -> list[TrialResult]:
    """Return the result of each trial, in their order. trials: those of the sweep's plan."""
    results = []
    modules: dict[int, Mapping[str, Any]] = {}
    for trial in trials:
        run_dir = folder.trial(trial.number)
        blank = TrialResult(number=trial.number, overrides=trial.overrides, status="waiting", run=run_dir.path)
        try:
            record = read_run(run_dir.path)
        except DamagedRunError:
            results.append(replace(blank, status="damaged"))
            continue
        if record is None:
            results.append(_result_without_record(blank, folder))
            continue
        results.append(_result(blank, record))
        modules[trial.number] = record.facts.get("modules") or {}

    changed = trials_of_changed_code(modules)
    return [replace(result, code_changed=result.number in changed) for result in results]


def _result_without_record(blank: TrialResult, folder: SweepFolder) -> TrialResult:
    """Return the result of a trial that hasn't recorded anything yet."""
    run_dir = folder.trial(blank.number)
    if is_locked(run_dir):
        return replace(blank, status="running")
    # It was killed before it had written its configuration.
    if os.path.lexists(run_dir.path):
        return replace(blank, status="crashed")
    try:
        why = read_text(folder.refusal(blank.number))
    except FileNotFoundError:
        return replace(blank, status="waiting")
    except (OSError, ValueError):
        return replace(blank, status=REFUSED)
    return replace(blank, status=REFUSED, cause=why.strip().partition("\n")[0])


def _result(blank: TrialResult, record: RunRecord) -> TrialResult:
    results = record.facts.get("results") or {}
    best = results.get("best") or {}
    cause = None
    if record.status == "failed":
        cause = _cause(record.run_dir)
    return replace(
        blank,
        status=record.status,
        score=record.best,
        step=_whole(best.get("step")),
        steps=_whole(results.get("steps")),
        epochs=_whole(results.get("epochs")),
        seconds=record.seconds,
        cause=cause,
    )


def _whole(value: Any) -> int | None:
    """Return a number that `read_run` doesn't check; None for anything else."""
    return value if type(value) is int else None


# Changed code


def trials_of_changed_code(modules: Mapping[int, Mapping[str, Any]]) -> set[int]:
    """Return the trials that imported a module with another content than the first trial that imported it.

    Args:
        modules: for each trial, the hashes of the modules that it imported, by their names.
    """
    first_hashes: dict[str, Any] = {}
    changed = set()
    for number in sorted(modules):
        for name, content_hash in modules[number].items():
            if first_hashes.setdefault(name, content_hash) != content_hash:
                changed.add(number)
    return changed


# Causes


def _cause(run_dir: RunDir) -> str | None:
    """Return why a run failed, by its failure report; None if there is none that can be read."""
    report = read_object(run_dir.failure_of(node=0, attempt=0, is_last=True))
    if report is None:
        return None
    try:
        return cause_in_words(FailureReport.from_plain(report).first)
    except _WRONG_CONTENT:
        return None


def cause_in_words(first: RankFailure) -> str:
    """Return why the first rank failed, in two or three words: `out of memory`, `NaN loss`, `ZeroDivisionError`."""
    exception = first.exception or ""
    name = _exception_name(first)
    is_memory_error = name in ("MemoryError", "OutOfMemoryError")
    if first.oom or is_memory_error or OUT_OF_MEMORY.search(f"{exception}\n{first.said or ''}"):
        return "out of memory"
    bad_loss = _BAD_LOSS.search(exception)
    if bad_loss is not None:
        return _BAD_LOSSES[bad_loss[1]]
    if _BAD_WEIGHTS.search(exception):
        return "NaN or infinite weights"
    if _DISK_FULL.search(exception):
        return "disk full"
    if first.timed_out or first.kind is FailureKind.HUNG:
        return "timed out"
    match first.kind:
        case FailureKind.STOPPED:
            return "suspended"
        case FailureKind.UNREACHABLE:
            return "node lost"
        case FailureKind.SIGNAL:
            return f"killed ({first.signal})"
        case FailureKind.EXIT if first.status is None:
            return "process gone"
        case FailureKind.EXIT:
            return f"exit status {first.status}"
    return name


def _exception_name(first: RankFailure) -> str:
    """Return the name of the exception's class, without its module; "error" if it isn't known."""
    text = first.exception or ""
    if first.expected:
        # Of an error of ours, only the traceback has the class; its last lines are `framework.errors.RunError: text`.
        last_lines = (first.traceback or "").rstrip().removesuffix(text.rstrip())
        text = last_lines.rpartition("\n")[2].rpartition(".")[2]
    match = _EXCEPTION_NAME.match(text)
    return match[0] if match is not None else "error"
