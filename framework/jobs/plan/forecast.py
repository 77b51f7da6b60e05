"""The forecast for a training that ran out of memory: the peak of a step, and of the changes that lower it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from framework.config.parse import parse
from framework.config.schema import Config
from framework.config.topology import Topology
from framework.errors import describe_error
from framework.jobs.plan.step import trace_step

_FACTORS = (2, 4, 8)
# After it, no further change is traced.
_ENOUGH_S = 30.0


def forecast_memory(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the peak of a step, by category, and the first change that makes it fit.

    Called in a child of the fork server. The keys are those of `FailureReport.forecast`.

    Args:
        arguments: `config` (as in config.yaml), `topology` (its fields), `backend`, and `capacity_bytes` of the device;
            if it is None, a change fits that lowers the peak.
    """
    started = time.monotonic()
    config = parse(arguments["config"])
    topology = Topology(**arguments["topology"])
    backend = arguments["backend"]
    try:
        peak = trace_step(config, topology, backend=backend).peak()
    except (DataDependentOutputException, DynamicOutputShapeException):
        return {"note": "There is no forecast: the model needs the values of its tensors."}
    # The user's code may fail where a step is only traced.
    except Exception as error:
        return {"note": f"There is no forecast: {describe_error(error)}"}
    by_category = {name: size for name, size in peak.by_category.items() if size}
    forecast = {"peak_bytes": peak.total_bytes, "by_category": by_category, "change": None, "note": None}

    capacity_bytes = arguments["capacity_bytes"]
    if capacity_bytes is not None and peak.total_bytes <= capacity_bytes:
        # Something else takes the memory, which no change of these lowers.
        return forecast
    limit = capacity_bytes or peak.total_bytes - 1
    for typed, changed in _changes(config):
        if time.monotonic() - started > _ENOUGH_S:
            break
        try:
            changed_bytes = trace_step(changed, topology, backend=backend).peak().total_bytes
        except Exception:
            # The batch can't be split so, the model can't be recomputed, or the user's code fails: try the next one.
            continue
        if changed_bytes <= limit:
            return {**forecast, "change": {"typed": typed, "peak_bytes": changed_bytes}}
    return forecast


def _changes(config: Config) -> Iterator[tuple[str, Config]]:
    """Yield what to type and the configuration with it, the cheapest first. The global batch stays as it is."""
    data = config.data
    trainer = config.trainer
    for factor in _FACTORS:
        accumulate = trainer.accumulate_grad_batches * factor
        typed = f"trainer.accumulate_grad_batches={accumulate}"
        smaller = data
        if data.global_batch_size is None:
            if data.train_batch_size % factor:
                break
            smaller = replace(data, batch_size=data.train_batch_size // factor)
            typed = f"data.batch_size={smaller.batch_size} {typed}"
        yield typed, replace(config, data=smaller, trainer=replace(trainer, accumulate_grad_batches=accumulate))
    if trainer.activation_checkpointing is None and trainer.compile is None:
        recomputing = replace(trainer, activation_checkpointing="auto")
        yield "trainer.activation_checkpointing=auto", replace(config, trainer=recomputing)
