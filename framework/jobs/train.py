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
from framework.jobs.request import Request
from framework.jobs.summary import announcement, closing, interruption
from framework.launch.plan import LaunchPlan, Outcome
from framework.run_dir import RunDir, create_run_dir
from framework.topology import resolve_topology

ENTRY = "framework.engine:run_rank"


def main(request: Request) -> int:
    """Train as asked; gives the exit status. Raises FrameworkError for what can't be done as asked."""
    config = request.config
    topology = resolve_topology(config.topology, gpus=resolve_gpus(config.trainer.gpus))
    run_dir = _run_dir(config)
    save_config(run_dir, request)
    record_start(run_dir, topology)
    print(announcement(config, topology, run_dir), flush=True)
    plan = LaunchPlan(
        entry=ENTRY,
        run_dir=run_dir,
        topology=topology,
        init_method=config.backend.init_method,
        start_timeout_s=config.backend.init_timeout,
        grace_s=config.launcher.grace,
        warm=request.warm,
    )
    return _launch(config, plan)


def _launch(config: Config, plan: LaunchPlan) -> int:
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
    if outcome.failure is not None:
        print(outcome.failure.render(), file=sys.stderr, flush=True)
    if outcome.status != EXIT_WRONG_REQUEST:
        print(closing(config, plan.run_dir, failed=outcome.status != 0), flush=True)
    return outcome.status


def _run_dir(config: Config) -> RunDir:
    if config.resume is not None:
        return RunDir(Path(config.resume))
    return create_run_dir(Path(config.path.outputs), recipe=config.recipe)
