"""The forecast for a training that ran out of memory: the peak of a step, and of a change that makes it fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from framework.config.parse import parse
from framework.config.topology import Topology
from framework.errors import describe_error
from framework.jobs.plan.devices import find_device
from framework.jobs.plan.memory import StepMemory
from framework.jobs.plan.step import prepared_step
from framework.launch.rank_environment import become_first_rank


def forecast_memory(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the peak of a step, by category, and the first change that makes it fit.

    Called in a child of the fork server. The keys are those of `FailureReport.forecast`.

    Args:
        arguments: `config` (as in config.yaml), `topology` (its fields), and `capacity_bytes` of the device; if it is
            None, a change fits that lowers the peak.
    """
    config = parse(arguments["config"])
    topology = Topology(**arguments["topology"])
    become_first_rank(config.launcher, topology)
    capacity_bytes = arguments["capacity_bytes"]
    device = find_device("this", uses_gpus=topology.gpus_per_node > 0)._replace(memory_bytes=capacity_bytes)
    notes: list[str] = []
    try:
        with prepared_step(config, topology) as prepared:
            # Nothing is run that could run out of memory again.
            memory = StepMemory(prepared, config, device, notes=notes, runs_operators=False)
            changes = []
            # If it fits, something else takes the memory, which no change of these lowers.
            if capacity_bytes is None:
                changes = memory.cheapest_changes(1, limit_bytes=memory.peak_bytes - 1)
            elif not memory.fits:
                changes = memory.cheapest_changes(1)
    # The user's code may fail where a step is only traced.
    except Exception as error:
        return {"note": f"There is no forecast: {describe_error(error)}"}
    change = None
    for tried in changes:
        if tried.fits:
            change = {"typed": " ".join(tried.overrides), "peak_bytes": tried.peak}
    return {
        "peak_bytes": memory.peak_bytes,
        "by_category": {name: size for name, size in memory.by_category.items() if size},
        "change": change,
        "note": None,
    }
