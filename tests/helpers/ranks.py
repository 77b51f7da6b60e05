"""Entries that real ranks run, and what they leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from framework.config.schema import InitMethod
from framework.launch import local
from framework.launch.panel import render
from framework.launch.plan import LaunchPlan
from framework.launch.warm import WarmServer
from framework.launch.watch import Limits
from framework.run_dir import create_run_dir
from framework.topology import Topology


def left_by_ranks(entry: str, *, procs: int, warm: WarmServer, folder: Path) -> list[Any]:
    """Runs `entry` ("module:function") on CPU ranks of one node; gives what each wrote to its rank_N.json."""
    run_dir = create_run_dir(folder)
    plan = LaunchPlan(
        entry=entry,
        run_dir=run_dir,
        topology=Topology(nnodes=1, procs_per_node=procs, gpus_per_node=0, span=1),
        init_method=InitMethod.ENV,
        limits=Limits(init_timeout_s=60.0, timeout_s=60.0, late_after_s=10.0),
        terminal=False,
        warm=warm,
    )
    outcome = local.launch(plan)
    assert outcome.failure is None, render(outcome.failure)
    return [json.loads((run_dir.path / f"rank_{rank}.json").read_text()) for rank in range(procs)]
