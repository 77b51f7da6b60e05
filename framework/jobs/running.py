"""What every job that starts ranks does around them: directory, records, launcher, report."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from framework.checkpoint import find
from framework.config.saved import keep_before, put_back, run_of, save_config
from framework.config.schema import Config
from framework.errors import EXIT_WRONG_REQUEST, RunError
from framework.hardware import resolve_gpus
from framework.jobs.record import record_end, record_start
from framework.jobs.request import JobResult, Request
from framework.jobs.summary import announcement
from framework.launch.plan import LaunchPlan, Outcome
from framework.run_dir import RunDir, create_run_dir, locked
from framework.topology import Topology, resolve_topology


@dataclass(frozen=True)
class Words:
    """What a job says: `doing` begins its first line, `closing` makes its last ones, `interrupted` those of Ctrl-C."""

    doing: str
    closing: Callable[[Config, RunDir, bool], str]
    interrupted: Callable[[RunDir], str]


def check(request: Request) -> Topology:
    """What can be found wrong before anything is made, beyond the configuration itself. Raises FrameworkError."""
    config = request.config
    if config.init_from is not None and config.resume is None:
        find(Path(config.init_from))
    return resolve_topology(config.topology, gpus=resolve_gpus(config.trainer.gpus))


def run(request: Request, *, entry: str, words: Words) -> JobResult:
    """Run `entry` ("module:function") in every rank of the topology asked for, in a run directory.

    Raises FrameworkError for what can't be done as asked, KeyboardInterrupt on Ctrl-C; no rank is left in any case.
    """
    topology = check(request)
    run_dir = _run_dir(request)
    with locked(run_dir):
        _record_start(run_dir, request, topology)
        return _run(request, topology, run_dir, entry=entry, words=words)


def _run(request: Request, topology: Topology, run_dir: RunDir, *, entry: str, words: Words) -> JobResult:
    """Launch in a run directory that is this process's own, and say how that went."""
    config = request.config
    quiet = request.place is not None
    if not quiet:
        print(announcement(words.doing, config.recipe, topology, run_dir), flush=True)
    plan = LaunchPlan(
        entry=entry,
        run_dir=run_dir,
        topology=topology,
        init_method=config.backend.init_method,
        start_timeout_s=config.backend.init_timeout,
        grace_s=config.launcher.grace,
        terminal=not quiet,
        # One that has died takes only its own job with it: the launcher starts another where there is none.
        warm=request.warm if request.warm is not None and request.warm.alive else None,
    )
    outcome = _launch(config, plan, interrupted=words.interrupted)
    if outcome.failure is not None:
        print(outcome.failure.render(), file=sys.stderr, flush=True)
    if outcome.status != EXIT_WRONG_REQUEST and not quiet:
        print(words.closing(config, run_dir, outcome.status != 0), flush=True)
    results: dict[str, Any] = run_dir.read_run().get("results", {})
    return JobResult(outcome.status, run_dir, score=results.get("score"))


def _launch(config: Config, plan: LaunchPlan, *, interrupted: Callable[[RunDir], str]) -> Outcome:
    """Run the ranks; `run.json` says how that ended, whatever ends it."""
    name = "local" if config.launcher.name == "auto" else config.launcher.name
    launcher = importlib.import_module(f"framework.launch.{name}")
    try:
        outcome: Outcome = launcher.launch(plan)
    except KeyboardInterrupt:
        _record_end(plan.run_dir, status="interrupted")
        print(interrupted(plan.run_dir), file=sys.stderr, flush=True)
        raise
    except BaseException:
        _record_end(plan.run_dir, status="failed")
        raise
    _record_end(plan.run_dir, status="finished" if outcome.status == 0 else "failed")
    return outcome


def _record_start(run_dir: RunDir, request: Request, topology: Topology) -> None:
    """Raises RunError where the disk refuses."""
    try:
        if request.config.resume is not None:
            keep_before(run_dir)
            run_dir.failure_file.unlink(missing_ok=True)  # of the beginning before; its logs stay
        save_config(run_dir, request)
        record_start(run_dir, topology)
    except OSError as error:
        raise RunError(
            f"The run directory {run_dir.path} can't be written: {error.strerror or error}.\n"
            "Make room, or choose another folder with path.outputs=FOLDER."
        ) from error


def _record_end(run_dir: RunDir, *, status: str) -> None:
    """Where the disk refuses, that is said and nothing more: what ended the run has yet to be shown."""
    try:
        put_back(run_dir)  # where the ranks didn't take up what was typed
        record_end(run_dir, status=status)
    except OSError as error:
        print(f"{run_dir.run_file} can't be written: {error.strerror or error}.", file=sys.stderr, flush=True)


def _run_dir(request: Request) -> RunDir:
    config, place = request.config, request.place
    if config.resume is not None:
        return run_of(config.resume)
    if place is not None:
        return create_run_dir(place.folder, name=str(place.number))
    return create_run_dir(Path(config.path.outputs) / config.recipe)
