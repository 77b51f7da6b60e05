"""How long a step and the whole run take, what bounds a step, and what the run costs. No torch here.

A few steps are made (`short_training`); the trace of one tells how much of their time arithmetic and memory take at
least (`roofline`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from framework.command.request import Request
from framework.config.schema import Config, PlanConfig, TrainerConfig
from framework.data.epochs import apply_limit
from framework.errors import ConfigError, RunError
from framework.jobs.plan.short_training import TimedSteps, time_steps
from framework.system.run_dir import read_object

_KEY = "plan.preflight"
# Operators are taken to reach this share of the speed of a large matrix product or a copy.
_USUAL_SPEED = 0.5
# Parts of a step that aren't the model's and the optimizer's.
_DATA = "data"
_EXCHANGE = "waiting"


def measured_time(request: Request, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return how long steps take on this machine, under the keys listed in `plan.job`; without times if they fail.

    plan: all else, with what `estimate` found for it under `time`.

    Raises:
        ConfigError: what plan.preflight names isn't the result of a preflight.
        RequestError: training would refuse the request.
    """
    config = request.config
    work = plan["time"]
    notes: list[str] = list(work["notes"])
    nnodes = plan["topology"]["nnodes"]
    between_nodes_s = 0.0
    if nnodes > 1:
        measured_s = exchange_seconds(config.plan, plan["traffic"]["reduced"])
        if measured_s is None:
            notes.append(
                f"The exchange between nodes isn't counted: {_KEY}=RUN says where job=preflight has measured it."
            )
        between_nodes_s = measured_s or 0.0
    if plan["data"]["source"] != "data":
        return _unknown(work, "A step can't be made here, since the data isn't on this machine.")
    try:
        steps = time_steps(request, val_batches=_validation_batches(config, plan["data"]))
    except RunError as error:
        return _unknown(work, f"A step can't be made here: {error}")

    parts = _parts(steps, work)
    # The exchange runs beside the backward; what takes longer than that is waited for.
    parts["exchange"] += max(0.0, between_nodes_s - steps.parts.get("backward", 0.0))
    step_s = sum(parts.values())
    validation_s = steps.validation_s or 0.0
    total = plan["steps"]["total"]
    hours = None
    if total is not None:
        validations = _validations(config.trainer, total=total, per_epoch=plan["steps"]["per_epoch"])
        hours = (step_s * total + validation_s * validations) / 3600
    mfu = None
    if work["at_peak_s"] is not None:
        mfu = work["at_peak_s"] / step_s
    return {
        "device": work["device"],
        "threads": work["threads"],
        "steps": steps.steps,
        "step_s": step_s,
        "validation_s": validation_s,
        "parts": parts,
        "bound_by": max(parts, key=lambda part: parts[part]),
        "flops": work["flops"],
        "mfu": mfu,
        "hours": hours,
        "cost": cost_of(hours, config.plan, nnodes=nnodes),
        "notes": notes,
    }


def _unknown(work: Mapping[str, Any], reason: str) -> dict[str, Any]:
    return {"device": work["device"], "step_s": None, "notes": [*work["notes"], reason]}


def _parts(steps: TimedSteps, work: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of a step by what bounds them."""
    data_s = steps.parts.get(_DATA, 0.0)
    exchange_s = steps.parts.get(_EXCHANGE, 0.0)
    busy_s = steps.step_s - data_s - exchange_s
    compute_s = busy_s
    memory_s = 0.0
    if work["compute_s"] is not None:
        # What they leave is neither: Python, autograd, and operators that are too small to be fast.
        usual_s = (work["compute_s"] + work["memory_s"]) / _USUAL_SPEED
        scale = min(1.0, busy_s / usual_s) / _USUAL_SPEED
        compute_s = scale * work["compute_s"]
        memory_s = scale * work["memory_s"]
    return {
        "compute": compute_s,
        "memory": memory_s,
        "overhead": max(0.0, busy_s - compute_s - memory_s),
        "exchange": exchange_s,
        "data": data_s,
    }


def _validation_batches(config: Config, data: Mapping[str, Any]) -> dict[str, int]:
    """Return the batches of each validation set whose size is known."""
    batches = {}
    for name, samples in data.items():
        if name.partition("/")[0] == "val" and samples:
            number = apply_limit(
                math.ceil(samples / config.data.evaluated_batch_size), config.trainer.limit_val_batches
            )
            if number:
                batches[name] = number
    return batches


def _validations(trainer: TrainerConfig, *, total: int, per_epoch: int | None) -> int:
    """Return how many validations a run of `total` steps makes, as far as the length of its epochs is known."""
    interval = trainer.val_check_interval
    every_epochs = trainer.check_val_every_n_epoch
    if isinstance(interval, int):
        return total // interval
    if per_epoch is None or every_epochs is None:
        return 0
    validations = total // per_epoch // every_epochs
    if interval is not None:
        validations *= per_epoch // max(1, int(per_epoch * interval))
    return validations


def cost_of(hours: float | None, settings: PlanConfig, *, nnodes: int) -> float | None:
    """Return what the run costs; None if its length or the price isn't known."""
    if hours is None or settings.price_per_hour is None:
        return None
    return hours * settings.price_per_hour * nnodes


def exchange_seconds(settings: PlanConfig, reduced_bytes: int) -> float | None:
    """Return the time of an all-reduce, from what a preflight measured; None without plan.preflight.

    Raises ConfigError: what it names isn't the result of a preflight.
    """
    if settings.preflight is None:
        return None
    path = Path(settings.preflight)
    if path.is_dir():
        path /= "preflight.json"
    points = _all_reduce_points(path)
    if not points:
        raise ConfigError(
            f"{_KEY}={settings.preflight}: there is no all_reduce in it. Name the run of a job=preflight with the "
            "same number of processes."
        )
    for smaller, larger in pairwise(points):
        if reduced_bytes <= larger["size_bytes"]:
            share = (reduced_bytes - smaller["size_bytes"]) / (larger["size_bytes"] - smaller["size_bytes"])
            return float(smaller["seconds"] + max(0.0, share) * (larger["seconds"] - smaller["seconds"]))
    # Larger than any that was measured: at the bandwidth of the largest.
    return float(points[-1]["seconds"] * reduced_bytes / points[-1]["size_bytes"])


def _all_reduce_points(path: Path) -> list[Mapping[str, Any]]:
    content = read_object(path) or {}
    for check in content.get("checks", []):
        if check.get("name") == "all_reduce":
            points: list[Mapping[str, Any]] = check["points"]
            return points
    return []
