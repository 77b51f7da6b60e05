"""Find the largest batch that fits on every rank."""

from __future__ import annotations

from functools import partial
from typing import Any

from framework.data.batching import BatchPlan
from framework.data.loader import MapLoader
from framework.engine.setup import RankSetup
from framework.errors import RunError
from framework.jobs.tune.memory import HostMemory
from framework.jobs.tune.sizes import BatchSizing, Forecast, largest_fitting
from framework.jobs.tune.trials import Trials
from framework.system.formatting import format_binary_bytes


def find_batch_size(
    setup: RankSetup, loader: MapLoader, forecast: Forecast, *, averages: int
) -> tuple[BatchPlan, dict[str, Any], dict[str, float]]:
    """Return the plan with the largest batch that fits, its entry in `tune.json`, and the overrides that select it.

    Every rank must call it.

    Args:
        forecast: where the search starts; that of rank 0 counts.
        averages: how many callbacks keep a copy of the model to evaluate.

    Raises:
        RunError: one sample doesn't fit.
        ConfigError: the global batch can't be split as finely as needed.
    """
    config = setup.config
    sizing = BatchSizing(
        setup.data_share.world_size,
        config.trainer.accumulate_grad_batches,
        config.data.global_batch_size,
        samples=loader.sizes.of(0),
    )
    trials = Trials(setup, loader, sizing, averages=averages)
    memory = trials.memory
    most, limited_by = sizing.most(config.tune.max_batch_size)
    if setup.context.is_main:
        room = "an unknown amount"
        if memory.room_bytes is not None:
            room = format_binary_bytes(memory.room_bytes)
        print(f"Batches of 1 to {most:,}: {room} of memory for a process's steps", flush=True)

    start = config.data.train_batch_size
    if isinstance(memory, HostMemory):
        # A batch too large for the host would get the process killed: start small and predict.
        start = 2
    predict = partial(trials.predicted_size, forecast)
    size = largest_fitting(trials.fits, start=start, most=most, predict=predict)
    if size == 0:
        trial = trials.tried[1]
        raise RunError(
            f"Not even a batch of 1 fits: rank {trial['refused_by']}: {trial['refusal']}\n"
            "Use a smaller model, trainer.precision=bf16-mixed, trainer.activation_checkpointing=auto, or a strategy "
            "that shards the model: strategy=fsdp"
        )

    if size < most:
        limited_by = "memory"
    plan = sizing.plan(size)
    entry = {
        "batch_size": sizing.pass_size(size),
        "limited_by": limited_by,
        "margin": config.tune.margin,
        "room_bytes": memory.room_bytes,
        "global_batch_size": plan.global_batch_size,
        "accumulate_grad_batches": plan.micro_batches,
        "trials": list(trials.tried.values()),
    }
    return plan, entry, sizing.overrides(size)
