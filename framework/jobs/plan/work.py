"""What a step computes, and the least time that this machine's device takes for it."""

from __future__ import annotations

from typing import Any

from framework.config.schema import Config
from framework.config.topology import Topology
from framework.errors import describe_error
from framework.jobs.plan.device_time import peak_speed
from framework.jobs.plan.devices import find_device
from framework.jobs.plan.roofline import bounds_of, speed_of_this_cpu
from framework.jobs.plan.step import NeedsValuesError, prepared_step, trace_step
from framework.jobs.plan.trace import Trace
from framework.system.hardware import threads_per_process


def work_of_step(config: Config, topology: Topology, *, trace: Trace | None = None) -> dict[str, Any]:
    """Return what `duration.measured_time` needs of a step: plain values, None where they are unknown.

    trace: of the step on this machine's device, if there is one already.
    """
    num_threads = config.trainer.num_threads or threads_per_process(topology.procs_per_node)
    device = find_device("this", uses_gpus=topology.gpus_per_node > 0)
    work: dict[str, Any] = {
        "device": device.name if device.is_gpu else "this CPU",
        "threads": num_threads,
        "flops": None,
        "compute_s": None,
        "memory_s": None,
        "at_peak_s": None,
        "notes": [],
    }
    try:
        if trace is None:
            trace = _trace(config, topology, for_cuda=device.is_gpu)
    except Exception as error:
        # The user's model may raise anything where it is only traced.
        note = f"What a step computes isn't known, so neither are its FLOPs and MFU: {describe_error(error)}"
        return {**work, "notes": [note]}
    speed = peak_speed(config, device=device.name) if device.is_gpu else speed_of_this_cpu(num_threads)
    if speed is None:
        return {**work, "notes": [f"MFU isn't known: {device.name} isn't in the table of GPUs."]}
    bounds = bounds_of(trace, speed)
    return {**work, **bounds._asdict()}


def _trace(config: Config, topology: Topology, *, for_cuda: bool) -> Trace:
    """Return what a step does; with real tensors if it needs their values."""
    with prepared_step(config, topology) as prepared:
        try:
            return trace_step(prepared, for_cuda=for_cuda)
        except NeedsValuesError:
            return trace_step(prepared, for_cuda=for_cuda, is_fake=False)
