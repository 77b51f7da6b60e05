"""`format=json`: what a command answers as one JSON document. docs/scripts.md lists the keys. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from framework.command.request import JobResult, Request
from framework.config.hints import wrong_value_hint
from framework.config.keys import find_key
from framework.errors import EXIT_STOPPED, ConfigError
from framework.launch.cluster_environment import typed_value
from framework.monitoring.failure import RankFailure
from framework.monitoring.report import FailureReport
from framework.runs.record import DamagedRunError, RunRecord, read_run
from framework.system.formatting import display_path
from framework.system.shown_text import masked_text

KEY = "format"
_STATUS = {0: "finished", EXIT_STOPPED: "stopped"}


def is_json(typed: Sequence[str]) -> bool:
    """Return True if `format=json` is typed. Raises ConfigError for a value that `format` doesn't have."""
    value = typed_value(typed, KEY)
    key = find_key(KEY)
    assert key is not None
    if value is not None and value not in key.options:
        raise ConfigError(f"{KEY}={value}: must be {key.allowed}.{wrong_value_hint(key, value, dotted=KEY)}")
    return value == "json"


def check_only_typed(composed: Mapping[str, Any]) -> None:
    """Raise ConfigError if a file sets `format`, which is known before files are read: then all else goes to stderr."""
    value = composed.get(KEY, "text")
    if value != "text":
        raise ConfigError(f"{KEY}={value} is set in a file. Type it on the command line, for one command: {KEY}=json")


def document_of(request: Request, result: JobResult, *, results: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the document of one job.

    Args:
        results: what the job found; None: what it returned, or else what the run's record has.
    """
    from framework.runs.listing import plain

    config = request.config
    record = _record(result)
    document: dict[str, Any] = {
        "job": config.job,
        "recipe": config.recipe,
        "status": _STATUS.get(result.status, "failed"),
        "exit_status": result.status,
        "run": None,
    }
    recorded: Mapping[str, Any] = {}
    if result.run_dir is not None:
        document["run"] = display_path(result.run_dir.path)
    if record is not None:
        document |= plain(record)
        recorded = record.facts.get("results") or {}
    if config.checkpoint.path is not None:
        document["checkpoint"] = display_path(Path(config.checkpoint.path))
    document["results"] = results or result.results or recorded
    document["failure"] = None
    if result.failure is not None:
        document["failure"] = _failure(result.failure)
    return document


def sweep_document(
    *, job: str, recipe: str, status: int, sweep: Path | None, results: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the document of several runs. sweep: their folder; None if there is none."""
    return {
        "job": job,
        "recipe": recipe,
        "status": _STATUS.get(status, "failed"),
        "exit_status": status,
        "sweep": None if sweep is None else display_path(sweep),
        "results": results,
    }


def _record(result: JobResult) -> RunRecord | None:
    """Return the run's record; None if there is no run, or its directory is on another machine or gone."""
    if result.run_dir is None:
        return None
    try:
        return read_run(result.run_dir.path)
    except DamagedRunError:
        return None


def _failure(report: FailureReport) -> dict[str, Any]:
    """Return which rank failed first, and why; `report` is the file that has the stacks."""
    from framework.sweeps.results import cause_in_words

    first: RankFailure = report.first
    return {
        "cause": cause_in_words(first),
        "message": masked_text(first.cause),
        "rank": first.rank,
        "node": first.node,
        "phase": first.phase,
        "step": first.step,
        "report": None if report.file is None else display_path(Path(report.file)),
    }
