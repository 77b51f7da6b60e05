"""One rank's life: who am I, meet the others, build, restore, train, test, leave."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from framework import build
from framework.checkpoint import CheckpointManager, find, load, load_weights
from framework.checkpoint.format import BEST
from framework.config.saved import confirm
from framework.config.schema import Config, Interval
from framework.data.loader import EvalLoader, TrainLoader, dataset_size
from framework.data.sampler import GlobalOrder
from framework.distributed.collectives import barrier
from framework.distributed.context import Context
from framework.distributed.group import process_group, set_timeout
from framework.errors import CheckpointError, ConfigError
from framework.evaluator import evaluate
from framework.launch.plan import RankArguments
from framework.limits import overfitted, train_windows
from framework.precision import PrecisionPlugin
from framework.rank_log import logger
from framework.seed import restore_generator_states, seed_everything
from framework.session import Rank, entered, eval_loader, load_model
from framework.trainer import Parts, Trainer, total_steps
from framework.types import Datasets, MapDataset


def run_rank(arguments: RankArguments) -> None:
    """Train as the run directory's `config.yaml` says, on this rank.

    What can be wrong with the request is found before the process group is made. Raises FrameworkError for it, and
    passes what the user's code raises.
    """
    with entered(arguments) as rank:
        datasets = overfitted(build.build_datasets(rank.config.data.datasets), rank.config.trainer, rank.plan)
        _check_monitors(rank.config, datasets)
        train_loader = _train_loader(rank, datasets.train)
        with process_group(rank.context, rank.config.backend, rendezvous=arguments.rendezvous):
            _run(rank, datasets, train_loader)


def _check_monitors(config: Config, datasets: Datasets) -> None:
    """Raise ConfigError for a metric that is watched and never known."""
    if datasets.val is not None:
        return
    watched = {"scheduler.monitor": config.scheduler.monitor}
    if config.checkpoint.enabled:
        watched["checkpoint.monitor"] = config.checkpoint.monitor
    watched |= {f"callbacks.{name}.monitor": node.get("monitor") for name, node in config.callbacks.items()}
    for key, metric in watched.items():
        if metric is not None:
            raise ConfigError(
                f"{key}={metric} is never known: data.datasets gives no validation part.\n"
                f"Give it one, or leave out what watches it ({key}=null for a checkpoint)."
            )


def _run(rank: Rank, datasets: Datasets, train_loader: TrainLoader) -> None:
    """Build, restore, train, test: inside the process group."""
    settings = rank.config.trainer
    val_loader = eval_loader(rank, datasets.val, part="val", limit=settings.limit_val_batches)
    test_loader = eval_loader(rank, datasets.test, part="test", limit=settings.limit_test_batches)
    trainer = _build_trainer(rank, train_loader, val_loader)
    try:
        _restore(rank, trainer)
        if rank.context.is_main:
            _introduce(rank, trainer, datasets)
        started = time.perf_counter()
        trainer.fit()
        seconds = time.perf_counter() - started
        test_metrics, tested = _test(rank, trainer, test_loader)
        if rank.context.is_main:
            metrics = {**trainer.val_metrics, **test_metrics}
            _report(rank, trainer, metrics=metrics, tested=tested, seconds=seconds)
    finally:
        for part in (*trainer.parts.loggers.values(), train_loader, val_loader, test_loader):
            if part is not None:
                part.close()


def _train_loader(rank: Rank, dataset: MapDataset) -> TrainLoader:
    config = rank.config
    size = dataset_size(dataset, part="train")
    shuffle = config.data.shuffle and config.trainer.overfit_batches is None
    return TrainLoader(
        dataset,
        order=GlobalOrder(size, seed=config.seed, shuffle=shuffle),
        plan=rank.plan,
        rank=rank.context.rank,
        device=rank.context.device,
        num_workers=config.data.num_workers,
        limit=train_windows(config.trainer, rank.plan, size=size),
    )


def _build_trainer(rank: Rank, train_loader: TrainLoader, val_loader: EvalLoader | None) -> Trainer:
    config, context = rank.config, rank.context
    # The same on every rank: replicas begin equal, whether or not the strategy makes them so.
    seed_everything(config.seed, rank=0)
    precision = PrecisionPlugin(config.trainer.precision, device=context.device)
    model = precision.convert_model(build.build_model(config.model, context=context))
    wrapped = rank.strategy.wrap(model)
    optimizer = build.build_optimizer(config.optimizer, model.parameters())
    parts = Parts(
        model=wrapped,
        task=build.build_task(config.task),
        strategy=rank.strategy,
        precision=precision,
        optimizer=optimizer,
        schedule=build.build_scheduler(config.scheduler, optimizer, _schedule_length(config, len(train_loader))),
        callbacks=build.build_callbacks(config.callbacks),
        loggers=build.build_loggers(config.logger, run_dir=rank.run_dir) if context.is_main else {},
    )
    seed_everything(config.seed, rank=context.rank)
    return Trainer(
        parts,
        config.trainer,
        context=context,
        train_loader=train_loader,
        val_loader=val_loader,
        checkpoints=_checkpoints(rank),
        after_first_step=partial(set_timeout, config.backend.timeout, context),
    )


def _schedule_length(config: Config, steps_per_epoch: int) -> int | None:
    """How often a scheduler of this interval moves in the whole run; None where nothing but a callback ends it."""
    steps = total_steps(config.trainer, steps_per_epoch=steps_per_epoch)
    if steps is None or config.scheduler.interval is Interval.STEP:
        return steps
    return -(-steps // steps_per_epoch)


def _checkpoints(rank: Rank) -> CheckpointManager | None:
    if not rank.config.checkpoint.enabled:
        return None
    return CheckpointManager(
        rank.config.checkpoint,
        rank.run_dir.checkpoints,
        config_text=rank.run_dir.config_file.read_text(),
        is_writer=rank.context.is_main,
        barrier=partial(barrier, rank.context),
    )


def _restore(rank: Rank, trainer: Trainer) -> None:
    """Take up what the config names: the run's own last checkpoint (`resume`), else the weights of `init_from`."""
    own = _own_checkpoint(rank)
    if own is not None:
        _resume(rank, trainer, own)
    elif rank.config.init_from is not None:
        load_model(rank, trainer.parts.bare_model, Path(rank.config.init_from))
    if rank.config.resume is not None:
        barrier(rank.context)  # no rank has refused it
        if rank.context.is_main:
            confirm(rank.run_dir)


def _own_checkpoint(rank: Rank) -> Path | None:
    """The checkpoint to go on from; None for a new run, and for one that was stopped before its first.

    It is the one that `resume` names, the last one where that is the run directory.
    """
    if rank.config.resume is None:
        return None
    try:
        return find(Path(rank.config.resume))
    except CheckpointError:
        if any(rank.run_dir.checkpoints.glob("step_*")):
            raise
        logger.warning("%s has no checkpoint yet: the run begins anew", rank.run_dir.path)
        if rank.context.is_main:
            print("There is no checkpoint yet: the run begins anew", flush=True)
        return None


def _resume(rank: Rank, trainer: Trainer, source: Path) -> None:
    context = rank.context
    state = load(source, map_location=context.device)
    training, generators = state["training"], state["generators"]
    saved = yaml.safe_load((source / "config.yaml").read_text())
    _check_optimizer(rank.config, saved)
    _check_schedule(rank.config, saved)
    load_weights(trainer.parts.bare_model, training.get("model", state["model"]), source=source)
    trainer.load_state_dict(training)
    _change_optimizer(rank.config, saved, trainer.parts)
    logger.info("going on from %s", source)
    if len(generators) != context.world_size:
        counts = (len(generators), context.world_size)
        logger.warning("the checkpoint is of %d ranks, this run has %d: random generators begin anew", *counts)
    elif not restore_generator_states(generators[context.rank], devices=context.devices):
        logger.warning("the checkpoint is of other devices: their random generators begin anew")


def _check_optimizer(config: Config, saved: dict[str, Any]) -> None:
    now, then = config.optimizer["_target_"], saved["optimizer"]["_target_"]
    if now != then:
        raise ConfigError(
            f"resume can't go on with optimizer {now}: the checkpoint has the state of {then}.\n"
            "Keep that one, or start a new run from these weights with init_from."
        )


def _check_schedule(config: Config, saved: dict[str, Any]) -> None:
    """Raise ConfigError for another schedule than the checkpoint's: its state holds its settings and would win."""
    now, then = config.scheduler.schedule or {}, saved["scheduler"]["schedule"] or {}
    if now.get("_target_") != then.get("_target_"):
        raise ConfigError(
            f"resume can't go on with {_schedule_name(now)}: the checkpoint is of a run with {_schedule_name(then)}.\n"
            "Keep that, or start a new run from these weights with init_from."
        )
    changed = [name for name in {**then, **now} if now.get(name) != then.get(name)]
    if changed:
        one_by_one = ", ".join(f"{name}={now.get(name)} (it was {then.get(name)})" for name in changed)
        raise ConfigError(
            f"resume can't change a schedule that has begun: scheduler.schedule.{one_by_one}.\n"
            "Keep it as it was, or start a new run from these weights with init_from."
        )


def _schedule_name(node: Mapping[str, Any]) -> str:
    return f"the schedule {node['_target_']}" if node else "no schedule"


def _change_optimizer(config: Config, saved: dict[str, Any], parts: Parts) -> None:
    """Give the restored optimizer what was typed for it since; its state, as saved, has the old values."""
    changed = {name: value for name, value in config.optimizer.items() if saved["optimizer"].get(name) != value}
    for name, value in changed.items():
        if name == "lr":
            parts.schedule.set_learning_rate(parts.optimizer, value, before=saved["optimizer"].get(name))
        else:
            for group in parts.optimizer.param_groups:
                group[name] = value
    if changed:
        logger.info("changed since the checkpoint: %s", ", ".join(f"optimizer.{n}={v}" for n, v in changed.items()))


def _test(rank: Rank, trainer: Trainer, loader: EvalLoader | None) -> tuple[dict[str, float], str]:
    """Metrics of the test part, with the weights that validation found best, else with the last ones; and which."""
    if loader is None:
        return {}, ""
    best = rank.run_dir.checkpoints / BEST
    chosen = trainer.checkpoints is not None and trainer.checkpoints.monitor is not None and best.exists()
    if chosen:
        load_model(rank, trainer.parts.bare_model, best)
    with nullcontext() if chosen else trainer.evaluation_weights():
        metrics = evaluate(
            trainer.parts.bare_model,
            loader,
            task=trainer.parts.task,
            precision=trainer.parts.precision,
            context=rank.context,
            prefix="test",
        )
    if trainer.progress.step > trainer.start_step or rank.config.resume is None:  # else it is in the logs already
        for each in trainer.parts.loggers.values():
            each.metrics(metrics, step=trainer.progress.step, epoch=trainer.last_epoch)
    return metrics, find(best).name if chosen else "the last weights"


def _introduce(rank: Rank, trainer: Trainer, datasets: Datasets) -> None:
    """Show what is about to train, and give the loggers the config."""
    context, parts = rank.context, trainer.parts
    sizes = {"train": datasets.train, "val": datasets.val, "test": datasets.test}
    counts = ", ".join(f"{name} {len(part):,}" for name, part in sizes.items() if part is not None)
    parameters = sum(parameter.numel() for parameter in parts.bare_model.parameters())
    print(
        f"{type(parts.bare_model).__name__} with {parameters:,} parameters on {_named(context)} ({context.backend})\n"
        f"{counts} samples; global batch {rank.plan.global_batch_size}, {len(trainer.train_loader)} steps an epoch",
        flush=True,
    )
    if trainer.progress.step:
        print(f"Going on after step {trainer.progress.step:,}, epoch {trainer.progress.epoch}", flush=True)
    for each in parts.loggers.values():
        each.text("config", rank.run_dir.config_file.read_text())


def _named(context: Context) -> str:
    return ", ".join(dict.fromkeys(str(device) for device in context.devices))


def _report(rank: Rank, trainer: Trainer, *, metrics: dict[str, float], tested: str, seconds: float) -> None:
    """Leave the results in `run.json`, where the parent reads them for the closing summary."""
    progress = trainer.progress
    max_epochs = rank.config.trainer.max_epochs
    reached = "max_epochs" if max_epochs is not None and progress.epoch >= max_epochs else "max_steps"
    ended_by = trainer.stop_reason or f"trainer.{reached} reached"
    results = {
        "steps": progress.step,
        "epochs": progress.epoch,
        "seconds": seconds,
        "ended_by": ended_by,
        "metrics": metrics,
        "score": None if trainer.checkpoints is None else trainer.checkpoints.best_score,
        "tested": tested,
    }
    rank.run_dir.update_run({"results": results})
