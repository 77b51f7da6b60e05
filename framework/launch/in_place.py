"""The launcher for debuggers: one rank, in this very process. Breakpoints, prints and tracebacks as in any script."""

from __future__ import annotations

import importlib
import traceback

from framework.errors import RunError, TopologyError
from framework.launch.plan import LaunchPlan, Outcome, RankArguments


def launch(plan: LaunchPlan) -> Outcome:
    """Run the only rank here. What it raises passes through, but that SystemExit becomes RunError: leaving is no end.

    Raises TopologyError for more than one rank.
    """
    if plan.topology.world_size != 1:
        raise TopologyError(
            f"launcher=in_place runs one process, and {plan.topology.world_size} are asked for.\n"
            "Use launcher=local, or topology.procs_per_node=1."
        )
    module, _, name = plan.entry.partition(":")
    arguments = RankArguments(str(plan.run_dir.path), plan.topology, rank=0, rendezvous=None)
    try:
        getattr(importlib.import_module(module), name)(arguments)
    except SystemExit as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise RunError(
            f"The run was left early: SystemExit({error.code!r}) was raised at {place.filename}:{place.lineno}.\n"
            "To end a training before its last step, raise framework.Stop in a callback."
        ) from error
    return Outcome(status=0)
