"""Find the largest batch that fits on every rank."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from framework.config.schema import Config
from framework.data.batching import BatchPlan
from framework.data.loader import MapLoader
from framework.engine.setup import RankSetup
from framework.errors import ConfigError, RunError
from framework.jobs.tune.memory import HostMemory
from framework.jobs.tune.sizes import BatchSizing, Forecast, Forecasts, largest_fitting
from framework.jobs.tune.trials import Trials
from framework.system.formatting import format_binary_bytes

_RECOMPUTE = "trainer.activation_checkpointing"


class FoundBatch(NamedTuple):
    """The largest batch that fits, and what selects it."""

    config: Config
    plan: BatchPlan
    # `batch_size` of tune.json.
    entry: dict[str, Any]
    # Keys and values, as on the command line.
    overrides: dict[str, Any]


def find_batch_size(setup: RankSetup, loader: MapLoader, forecasts: Forecasts, *, averages: int) -> FoundBatch:
    """Return the largest batch that fits; for a global batch, with recomputing if that trains faster.

    Every rank must call it.

    Args:
        forecasts: where the search starts; those of rank 0 count.
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
    plain = _search(setup, loader, sizing, forecasts.plain, averages=averages)
    searches = [plain]
    may_recompute = config.trainer.activation_checkpointing is None and config.trainer.compile is None
    if config.data.global_batch_size is not None and plain.limited_by == "memory" and may_recompute:
        # The model of the trials is gone.
        gc.collect()
        recomputing = replace(config, trainer=replace(config.trainer, activation_checkpointing="auto"))
        if setup.context.is_main:
            print(f"The same with {_RECOMPUTE}=auto, which takes less memory and more time", flush=True)
        try:
            searches.append(
                _search(replace(setup, config=recomputing), loader, sizing, forecasts.recomputing, averages=averages)
            )
        except ConfigError as error:
            if setup.context.is_main:
                print(f"  not possible: {error}", flush=True)

    fitting = [search for search in searches if search.size > 0]
    if not fitting:
        trial = plain.trials[1]
        raise RunError(
            f"Not even a batch of 1 fits: rank {trial['refused_by']}: {trial['refusal']}\n"
            "Use a smaller model, trainer.precision=bf16-mixed, trainer.activation_checkpointing=auto, or a strategy "
            "that shards the model: strategy=fsdp"
        )
    best = max(fitting, key=lambda search: search.samples_per_s)
    plan = sizing.plan(best.size)
    entry = {
        "batch_size": sizing.pass_size(best.size),
        "limited_by": best.limited_by,
        "margin": config.tune.margin,
        "room_bytes": best.room_bytes,
        "global_batch_size": plan.global_batch_size,
        "accumulate_grad_batches": plan.micro_batches,
        "recomputes": best is not plain,
        "proposals": [_proposal(search, sizing) for search in fitting],
        "trials": list(best.trials.values()),
    }
    return FoundBatch(best.config, plan, entry, best.overrides(sizing))


class _Search(NamedTuple):
    """What came of a search."""

    config: Config
    # 0 if not even one sample fits.
    size: int
    limited_by: str
    room_bytes: int | None
    # By samples, as tune.json has them.
    trials: dict[int, dict[str, Any]]
    # With the largest size that fits.
    samples_per_s: float

    def overrides(self, sizing: BatchSizing) -> dict[str, Any]:
        overrides: dict[str, Any] = dict(sizing.overrides(self.size))
        if self.config.trainer.activation_checkpointing == "auto" and sizing.global_batch_size is not None:
            overrides[_RECOMPUTE] = "auto"
        return overrides


def _search(setup: RankSetup, loader: MapLoader, sizing: BatchSizing, forecast: Forecast, *, averages: int) -> _Search:
    """Find the largest batch with this configuration. Every rank must call it."""
    trials = Trials(setup, loader, sizing, averages=averages)
    memory = trials.memory
    most, limited_by = sizing.most(setup.config.tune.max_batch_size)
    if setup.context.is_main:
        room = "an unknown amount"
        if memory.room_bytes is not None:
            room = format_binary_bytes(memory.room_bytes)
        print(f"Batches of 1 to {most:,}: {room} of memory for a process's steps", flush=True)

    start = setup.config.data.train_batch_size
    if isinstance(memory, HostMemory):
        # A batch too large for the host would get the process killed: start small and predict.
        start = 2
    predict = partial(trials.predicted_size, forecast)
    size = largest_fitting(trials.fits, start=start, most=most, predict=predict)
    samples_per_s = 0.0
    if size > 0:
        samples_per_s = trials.tried[sizing.pass_size(size)]["samples_per_s"]
    if size < most:
        limited_by = "memory"
    return _Search(setup.config, size, limited_by, memory.room_bytes, trials.tried, samples_per_s)


def _proposal(search: _Search, sizing: BatchSizing) -> dict[str, Any]:
    """Return an entry of `proposals` in tune.json."""
    return {
        "batch_size": sizing.pass_size(search.size),
        "accumulate_grad_batches": sizing.passes(search.size),
        "samples_per_s": search.samples_per_s,
        "overrides": search.overrides(sizing),
    }
