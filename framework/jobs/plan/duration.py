"""Forecast how long a step and a whole run take, what bounds a step, and what the run costs. See `timing`."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path
from typing import Any

from framework.config.schema import Config
from framework.config.topology import Topology
from framework.data.loader import TrainLoader
from framework.engine.loaders import make_train_loader, prepare_data
from framework.engine.setup import procs_on_cores
from framework.errors import ConfigError, describe_error
from framework.jobs.plan.step import rank_setup, trace_step
from framework.jobs.plan.timing import cpu_step_time, seconds_for_batches
from framework.monitoring.rank_status import RankStatus
from framework.system.hardware import threads_per_process
from framework.system.run_dir import RunDir, read_object

_BATCHES = 3
_KEY = "plan.preflight"


def measured_time(
    config: Config, topology: Topology, *, backend: str, reduced_bytes: int, total_steps: int | None
) -> dict[str, Any]:
    """Return the forecast for this CPU, under the keys listed in `plan.job`; without times if it can't be traced.

    Args:
        reduced_bytes: of all gradients, as a step exchanges them.
        total_steps: of the run; None if unknown.

    Raises:
        ConfigError: what plan.preflight names isn't the result of a preflight.
    """
    notes: list[str] = []
    exchange_s = _exchange_seconds(config, topology, reduced_bytes, notes)
    try:
        trace = trace_step(config, topology, backend=backend)
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            status = stack.enter_context(closing(RankStatus()))
            setup = rank_setup(config, topology, backend=backend, run_dir=RunDir(Path(folder)), rank_status=status)
            datasets, setup = prepare_data(setup)
            loader = make_train_loader(setup, datasets)
            stack.callback(loader.close)
            num_threads = config.trainer.num_threads or threads_per_process(procs_on_cores(config, setup.context))
            step_time = cpu_step_time(trace, num_threads=num_threads, notes=notes)
            load_s = _load_seconds(loader)
    except Exception as error:
        # A model that needs the values of tensors raises anything.
        return _unknown(f"The time of a step can't be forecast here: {describe_error(error)}")

    busy_s = step_time.compute + step_time.memory + step_time.overhead + (exchange_s or 0.0)
    data_s = load_s
    if config.data.num_workers:
        # Workers load while the model computes.
        data_s = max(0.0, load_s / config.data.num_workers - busy_s)
    parts = {
        "compute": step_time.compute,
        "memory": step_time.memory,
        "overhead": step_time.overhead,
        "exchange": exchange_s or 0.0,
        "data": data_s,
    }
    step_s = busy_s + data_s
    hours = None
    cost = None
    if total_steps is not None:
        hours = step_s * total_steps / 3600
    if hours is not None and config.plan.price_per_hour is not None:
        cost = hours * config.plan.price_per_hour * topology.nnodes
    return {
        "device": "this CPU",
        "threads": num_threads,
        "step_s": step_s,
        "parts": parts,
        "bound_by": max(parts, key=lambda part: parts[part]),
        "flops": trace.flops,
        "mfu": step_time.at_peak / step_s,
        "hours": hours,
        "cost": cost,
        "notes": notes,
    }


def _unknown(reason: str) -> dict[str, Any]:
    return {"device": "this CPU", "step_s": None, "notes": [reason]}


def _load_seconds(loader: TrainLoader) -> float:
    """Return how long this process takes to load the samples of a step."""
    windows = iter(loader.epoch(0))

    def load() -> None:
        nonlocal windows
        window = next(windows, None)
        if window is None:
            windows = iter(loader.epoch(0))
            window = next(windows)
        for _ in window.micro_batches:
            pass

    # It may start threads or read the first file.
    load()
    return seconds_for_batches(load, number=_BATCHES)


def _exchange_seconds(config: Config, topology: Topology, reduced_bytes: int, notes: list[str]) -> float | None:
    """Return the time of an all-reduce of the gradients, from what a preflight measured; None if unknown."""
    if topology.world_size == 1:
        return None
    if config.plan.preflight is None:
        notes.append(f"The exchange between ranks isn't counted: {_KEY}=RUN says where job=preflight has measured it.")
        return None
    path = Path(config.plan.preflight)
    if path.is_dir():
        path /= "preflight.json"
    points = _all_reduce_points(path)
    if not points:
        raise ConfigError(
            f"{_KEY}={config.plan.preflight}: there is no all_reduce in it. Name the run of a job=preflight with the "
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
