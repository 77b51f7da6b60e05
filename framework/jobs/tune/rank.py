"""`job=tune` on one rank: first the largest batch, then the learning rate for it; writes tune.json and a plot.

No checkpoint is written; callbacks, schedules and evaluation are left out.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from framework.config.optimizers import is_several, optimizer_configs, takes_closure
from framework.config.schema import Config
from framework.config.targets import takes
from framework.data.loader import MapLoader
from framework.distributed.collectives import barrier
from framework.distributed.process_group import process_group
from framework.engine.build_trainer import build_trainer
from framework.engine.builders.observers import build_callbacks
from framework.engine.data_checks import streams_of
from framework.engine.loaders import make_train_loader, prepare_data
from framework.engine.out_of_memory import is_out_of_memory
from framework.engine.setup import RankSetup, setup_rank
from framework.engine.weights import load_initial_weights, loads_before_adapters
from framework.errors import ConfigError, DataError, RunError, describe_error
from framework.jobs.tune.batch_size import find_batch_size
from framework.jobs.tune.findings import PLOT, RESULT
from framework.jobs.tune.lr_range import assess, plot, range_test
from framework.jobs.tune.sizes import Forecast, Forecasts
from framework.jobs.tune.steps import full_steps, train_steps, tuned_config
from framework.launch.plan import MonitorLink, RankArguments
from framework.monitoring.rank_status import RankPhase
from framework.system.run_dir import read_object, write_atomically, write_object
from framework.types import hooks


def tune_rank(arguments: RankArguments, link: MonitorLink) -> None:
    """Write tune.json in the run directory as soon as something is found.

    Raises FrameworkError, and passes what the user's code raises.
    """
    with setup_rank(arguments, link) as setup, ExitStack() as stack:
        setup = replace(setup, config=_checked_config(setup))
        datasets, setup = prepare_data(setup)
        if "train" in streams_of(datasets):
            raise DataError(
                "job=tune repeats batches, which a stream (IterableDataset) can't.\n"
                "Tune with some of its samples in a list, which is a map-style dataset."
            )
        loader: Any = make_train_loader(setup, datasets)
        stack.callback(loader.close)

        link.rank_status.set_phase(RankPhase.MEETING)
        group = process_group(
            setup.context,
            setup.config.backend,
            rendezvous=arguments.rendezvous,
            with_cpu=setup.strategy.exchanges_on_cpu,
        )
        stack.enter_context(group)
        stack.enter_context(link.recording())

        link.rank_status.set_phase(RankPhase.BUILDING)
        _tune(setup, loader)
        link.rank_status.set_phase(RankPhase.CLOSING)
        barrier(setup.context)


def _tune(setup: RankSetup, loader: MapLoader) -> None:
    """Search for the batch, then for the learning rate, and write tune.json after each. Every rank must call it."""
    config = setup.config
    tuned: dict[str, Any] = {"forecast": None, "batch_size": None, "overrides": {}}
    if setup.context.is_main:
        # What the command has written, on this node.
        tuned = read_object(setup.run_dir.path / RESULT) or tuned
    plan = setup.plan
    if config.tune.find_batch_size:
        callbacks = build_callbacks(setup.requested.callbacks, context=setup.context, run_dir=setup.run_dir)
        averages = len(hooks(callbacks.values(), "evaluation_weights"))
        forecasts = Forecasts()
        forecast = tuned["forecast"]
        if forecast is not None:
            forecasts = Forecasts(Forecast.of(forecast["points"]), Forecast.of(forecast["recomputing"]))
        found = find_batch_size(setup, loader, forecasts, averages=averages)
        setup = replace(setup, config=found.config)
        plan = found.plan
        tuned["batch_size"] = found.entry
        tuned["overrides"] = found.overrides
        _write(setup, tuned)
    # This frees the model of the trials.
    gc.collect()

    lr = _train_together(setup, full_steps(loader, plan), tuned["batch_size"])
    if lr is None:
        return
    tuned["lr"] = lr
    suggestion = lr["suggestion"]
    if suggestion is not None:
        key = "optimizer.lr" if "lr" in config.optimizer else "++optimizer.lr"
        tuned["overrides"][key] = float(f"{suggestion['lr']:.2g}")
    _write(setup, tuned)
    if setup.context.is_main:
        _plot(setup, lr)


def _checked_config(setup: RankSetup) -> Config:
    """Return the configuration to tune with. Raises ConfigError for what can't be tuned."""
    config = setup.config
    if config.tune.find_batch_size and setup.strategy.num_stages is not None:
        raise ConfigError(
            f"tune.find_batch_size=true tries batches on each process by itself; with strategy="
            f"{type(setup.strategy).__name__.lower()} a process computes with what another one sends it.\n"
            "Use tune.find_batch_size=false for the learning rate alone, or another strategy."
        )
    if any(takes_closure(optimizer) for optimizer in optimizer_configs(config.optimizer)):
        raise ConfigError(
            f"job=tune can't go with {config.optimizer['_target_']}, whose step computes the loss several times."
        )
    if config.tune.find_lr and is_several(config.optimizer):
        raise ConfigError(
            "tune.find_lr=true searches for optimizer.lr, and there are several optimizers: "
            f"{', '.join(config.optimizer)}.\nUse tune.find_lr=false for the batch alone."
        )
    if config.tune.find_lr and "lr" not in config.optimizer and not takes(config.optimizer, "lr"):
        raise ConfigError(
            f"tune.find_lr=true searches for optimizer.lr, and {config.optimizer['_target_']} takes no keyword lr.\n"
            "Use tune.find_lr=false for the batch alone."
        )
    return tuned_config(config)


def _write(setup: RankSetup, tuned: dict[str, Any]) -> None:
    """Write what was found so far, on rank 0."""
    if setup.context.is_main:
        write_object(setup.run_dir.path / RESULT, tuned)
        setup.run_dir.update_run({"results": {"overrides": tuned["overrides"]}})


def _train_together(setup: RankSetup, loader: MapLoader, batch: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Train with all ranks: the range test or, with `tune.find_lr=false`, a few steps to see if the batch fits.

    Returns:
        `lr` of tune.json; None without a range test.

    Raises:
        RunError: the batch that was found doesn't fit, though each rank by itself had room for it.
    """
    config = setup.config
    settings = setup.config.tune
    finish_step = setup.link.rank_status.finish_step
    samples = loader.global_batch_size
    try:
        trainer = build_trainer(setup, loader, {})
        if config.init_from is not None and not loads_before_adapters(config, None):
            load_initial_weights(trainer.state.bare_model, config, context=setup.context)
        if not settings.find_lr:
            for step, _ in enumerate(train_steps(trainer, loader, settings.steps_per_trial), start=1):
                finish_step(step)
            return None
        if setup.context.is_main:
            print(
                f"Learning rates from {settings.min_lr:g} to {settings.max_lr:g}, one for each of "
                f"{settings.num_training} steps of {samples:,} samples",
                flush=True,
            )
        losses = range_test(trainer, settings, on_step=finish_step)
        return {"global_batch_size": samples, **assess(losses, threshold=settings.early_stop_threshold)}
    except Exception as error:
        if batch is None or not is_out_of_memory(error):
            raise
        raise RunError(
            f"Batches of {batch['batch_size']} fit each process by itself, and not with the exchange of all: "
            f"{describe_error(error)}\nLeave more room than tune.margin={settings.margin:g}, or set "
            f"tune.max_batch_size below {batch['batch_size']}."
        ) from error


def _plot(setup: RankSetup, lr: Mapping[str, Any]) -> None:
    try:
        title = f"{setup.config.recipe}: {lr['global_batch_size']:,} samples per step"
        write_atomically(setup.run_dir.path / PLOT, plot(lr, title=title))
    except ModuleNotFoundError:
        print(f"No {PLOT}: it needs `pip install framework[plot]`", flush=True)
