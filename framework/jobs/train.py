"""`job=train`: resolve the topology, make the run directory, start the ranks, say how it ended. No torch here."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from framework.config.saved import save_config
from framework.config.schema import Config
from framework.errors import EXIT_WRONG_REQUEST
from framework.hardware import resolve_gpus
from framework.jobs.record import record_end, record_start
from framework.jobs.request import JobResult, Request
from framework.jobs.summary import announcement, closing, interruption
from framework.launch.plan import LaunchPlan, Outcome
from framework.run_dir import RunDir, create_run_dir
from framework.topology import resolve_topology

ENTRY = "framework.engine:run_rank"


def main(request: Request) -> JobResult:
    """Train as asked. Raises FrameworkError for what can't be done as asked."""
    config = request.config
    topology = resolve_topology(config.topology, gpus=resolve_gpus(config.trainer.gpus))
    run_dir = _run_dir(request)
    save_config(run_dir, request)
    record_start(run_dir, topology)
    quiet = request.place is not None
    if not quiet:
        print(announcement(config, topology, run_dir), flush=True)
    plan = LaunchPlan(
        entry=ENTRY,
        run_dir=run_dir,
        topology=topology,
        init_method=config.backend.init_method,
        start_timeout_s=config.backend.init_timeout,
        grace_s=config.launcher.grace,
        terminal=not quiet,
        warm=request.warm,
    )
    outcome = _launch(config, plan)
    if outcome.failure is not None:
        print(outcome.failure.render(), file=sys.stderr, flush=True)
    if outcome.status != EXIT_WRONG_REQUEST and not quiet:
        print(closing(config, run_dir, failed=outcome.status != 0), flush=True)
    return JobResult(outcome.status, run_dir, score=run_dir.read_run().get("results", {}).get("score"))


def _launch(config: Config, plan: LaunchPlan) -> Outcome:
    """Run the ranks; `run.json` says how that ended, whatever ends it."""
    name = "local" if config.launcher.name == "auto" else config.launcher.name
    launcher = importlib.import_module(f"framework.launch.{name}")
    try:
        outcome: Outcome = launcher.launch(plan)
    except KeyboardInterrupt:
        record_end(plan.run_dir, status="interrupted")
        print(interruption(plan.run_dir), file=sys.stderr, flush=True)
        raise
    except BaseException:
        record_end(plan.run_dir, status="failed")
        raise
    record_end(plan.run_dir, status="finished" if outcome.status == 0 else "failed")
    return outcome


def _run_dir(request: Request) -> RunDir:
    config, place = request.config, request.place
    if config.resume is not None:
        return RunDir(Path(config.resume))
    if place is not None:
        return create_run_dir(place.folder, name=str(place.number))
    return create_run_dir(Path(config.path.outputs) / config.recipe)
