"""What a step computes, and the least time that this machine takes for it."""

from __future__ import annotations

from typing import Any

from framework.config.schema import Config
from framework.config.topology import Topology
from framework.errors import describe_error
from framework.jobs.plan.roofline import bounds_of, speed_of_this_cpu
from framework.jobs.plan.step import NeedsValuesError, prepared_step, trace_step
from framework.jobs.plan.trace import Trace
from framework.system.hardware import threads_per_process


def work_of_step(config: Config, topology: Topology) -> dict[str, Any]:
    """Return what `duration.measured_time` needs of a step: plain values, None where they are unknown."""
    num_threads = config.trainer.num_threads or threads_per_process(topology.procs_per_node)
    work: dict[str, Any] = {
        "device": "this CPU",
        "threads": num_threads,
        "flops": None,
        "compute_s": None,
        "memory_s": None,
        "at_peak_s": None,
        "notes": [],
    }
    try:
        trace = _trace(config, topology)
    except Exception as error:
        # The user's model may raise anything where it is only traced.
        note = f"What a step computes isn't known, so neither are its FLOPs and MFU: {describe_error(error)}"
        return {**work, "notes": [note]}
    bounds = bounds_of(trace, speed_of_this_cpu(num_threads))
    return {**work, **bounds._asdict()}


def _trace(config: Config, topology: Topology) -> Trace:
    """Return what a step does; with real tensors if it needs their values."""
    with prepared_step(config, topology) as prepared:
        try:
            return trace_step(prepared)
        except NeedsValuesError:
            return trace_step(prepared, is_fake=False)
