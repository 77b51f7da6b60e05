"""The launcher for debuggers: one rank, in this very process. Breakpoints, prints and tracebacks as in any script."""

from __future__ import annotations

import importlib

from framework.errors import TopologyError
from framework.launch.plan import LaunchPlan, Outcome, RankArguments


def launch(plan: LaunchPlan) -> Outcome:
    """Run the only rank here. What it raises passes through. Raises TopologyError for more than one rank."""
    if plan.topology.world_size != 1:
        raise TopologyError(
            f"launcher=in_place runs one process, and {plan.topology.world_size} are asked for.\n"
            "Use launcher=local, or topology.procs_per_node=1."
        )
    module, _, name = plan.entry.partition(":")
    arguments = RankArguments(str(plan.run_dir.path), plan.topology, rank=0, rendezvous=None)
    getattr(importlib.import_module(module), name)(arguments)
    return Outcome(status=0)
