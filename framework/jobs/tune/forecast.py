"""The memory that a step is forecast to take with batches of several sizes, from traces on fake tensors.

No operator computes anything, so a trace of a large batch takes as long as one of a small one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from framework.config.parse import parse
from framework.config.schema import Config
from framework.config.topology import Topology
from framework.errors import describe_error
from framework.jobs.plan import cuda_rules
from framework.jobs.plan.devices import find_device
from framework.jobs.plan.step import NeedsValuesError, PreparedStep, prepared_step, trace_step
from framework.jobs.plan.trace import WEIGHTS
from framework.jobs.tune.sizes import Forecast
from framework.jobs.tune.steps import tuned_config
from framework.launch.rank_environment import become_first_rank

# The first sizes that are traced. With fewer samples, the peak may lie in the update, whatever their number.
_FIRST_SIZES = (8, 64)
# Of each rank, to load an example.
_LOADED_SAMPLES = 2
# Further traces, each where the line through the last two meets the memory that there is.
_MAX_FURTHER = 2
# Larger batches aren't traced, which takes the indices of tensors beyond what kernels support.
_LARGEST_SIZE = 1 << 16
# After so much CPU time, no further size is traced.
_ENOUGH_S = 30.0


def forecast_sizes(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return `forecast` of tune.json. Called in a child of the fork server: the user's code may keep fake tensors.

    Args:
        arguments: `config` (as in config.yaml), `topology` (its fields).
    """
    config = parse(arguments["config"])
    topology = Topology(**arguments["topology"])
    become_first_rank(config.launcher, topology)
    try:
        forecast = _forecast(config, topology)
    except NeedsValuesError:
        return {"points": [], "recomputing": [], "note": "the step needs the values of tensors"}
    # The user's code may fail where a step is only traced.
    except Exception as error:
        return {"points": [], "recomputing": [], "note": describe_error(error)}
    recomputing = Forecast(())
    if config.data.global_batch_size is not None and config.trainer.activation_checkpointing is None:
        recomputed = replace(config, trainer=replace(config.trainer, activation_checkpointing="auto"))
        # The model may have nothing that can be recomputed: then nothing is proposed either.
        with suppress(Exception):
            recomputing = _forecast(recomputed, topology)
    return {
        "points": [list(point) for point in forecast.points],
        "recomputing": [list(point) for point in recomputing.points],
        "note": None,
    }


def _forecast(config: Config, topology: Topology) -> Forecast:
    with prepared_step(_traced_config(config), topology) as prepared:
        return _forecast_of(config, prepared)


def _forecast_of(config: Config, prepared: PreparedStep) -> Forecast:
    topology = prepared.setup.context.topology
    started = time.process_time()
    uses_gpus = topology.gpus_per_node > 0
    device = find_device("this", uses_gpus=uses_gpus)
    room_bytes = None
    if device.memory_bytes is not None:
        sharing = topology.procs_per_gpu if uses_gpus else topology.procs_per_node
        room_bytes = int(device.memory_bytes * (1 - config.tune.margin)) // sharing

    forecast = Forecast(())
    sizes = list(_FIRST_SIZES)
    while sizes:
        size = sizes.pop(0)
        trace = trace_step(prepared, samples=size, for_cuda=uses_gpus)
        if uses_gpus:
            trace = cuda_rules.on_cuda(trace)
        peak = trace.peak()
        # A trial measures what is taken besides the model.
        forecast = forecast.with_point(size, peak.total_bytes - peak.by_category[WEIGHTS])

        is_early = len(forecast.points) < len(_FIRST_SIZES) + _MAX_FURTHER and time.process_time() - started < _ENOUGH_S
        if not sizes and room_bytes is not None and is_early:
            largest = forecast.largest(room_bytes)
            is_traced = largest in dict(forecast.points)
            if largest is not None and 0 < largest <= _LARGEST_SIZE and not is_traced:
                sizes.append(largest)
    return forecast


def _traced_config(config: Config) -> Config:
    """Return the configuration of a small step, with two passes if gradients are accumulated, as in a trial."""
    config = tuned_config(config)
    passes = 1
    if config.data.global_batch_size is not None or config.trainer.accumulate_grad_batches > 1:
        passes = 2
    return replace(
        config,
        data=replace(config.data, batch_size=_LOADED_SAMPLES, global_batch_size=None),
        trainer=replace(config.trainer, accumulate_grad_batches=passes),
    )
