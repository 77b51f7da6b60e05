"""Build the trainer of one rank: assemble the model, wrap it, and make the optimizer, the observers and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from framework.checkpoint import LocalStorage
from framework.checkpoint.manager import CheckpointManager
from framework.checkpoint.reader import load_progress
from framework.config.optimizers import optimizer_configs, refuses_scaled_losses
from framework.config.schema import CheckpointConfig, Node, ProgressMode, TrainerConfig
from framework.config.written import written_config
from framework.data.epochs import EpochSizes, EpochSteps
from framework.data.loader import EvalLoader, TrainLoader
from framework.data.skipping import SkippedSamples, SkippedSteps
from framework.distributed.collectives import broadcast_object
from framework.distributed.gloo_threads import let_gloo_finish_messages
from framework.distributed.process_group import new_group, set_group_timeouts, set_timeout
from framework.distributed.seed import seed_everything
from framework.engine.assemble import Assembled, assemble
from framework.engine.builders.observers import build_callbacks, build_loggers
from framework.engine.builders.optimizer import build_optimizer
from framework.engine.builders.schedule import build_schedule
from framework.engine.builders.strategy import check_built_callbacks
from framework.engine.data_checks import check_metrics, monitored
from framework.engine.setup import RankSetup
from framework.engine.state_bytes import tensor_bytes
from framework.engine.weights import loads_before_adapters
from framework.errors import ConfigError
from framework.launch.error_record import check_run_dir
from framework.media import Text
from framework.optim.objectives import Objectives, objectives_of
from framework.optim.optimizer import Closure, closure_of, has_evaluation_mode
from framework.optim.param_groups import ParamGroups
from framework.optim.schedule import Schedule, Schedules
from framework.optim.several import Optimizers
from framework.runs.segments import rolled_back_steps
from framework.strategies.activation_checkpointing import apply_activation_checkpointing
from framework.system.rank_log import warn
from framework.training import length as run_length
from framework.training.content_hash import parameter_hashes
from framework.training.stop_control import StopControl
from framework.training.train_state import TrainState
from framework.training.trainer import Trainer
from framework.types import EvalInfo, Task, hooks

# Gradients of at most this size are one bucket of DDP's, which is exchanged when the backward has computed all of them.
_FIRST_BUCKET_BYTES = 1 << 20


def build_trainer(
    setup: RankSetup,
    train_loader: TrainLoader,
    val_loaders: Mapping[str, EvalLoader],
    *,
    checkpoint: Path | None = None,
) -> Trainer:
    """Build the model, the optimizer and all else that training needs. Every rank must call it.

    checkpoint: the one that will be restored. Its progress decides how long the whole run is.
    """
    config = setup.config
    settings = config.trainer

    assembled = _assemble(setup, train_loader, checkpoint=checkpoint)
    # Parameters are grouped while the model is whole: the strategy may leave each rank a part of it.
    initial_hashes = None
    if config.checkpoint.only_trained:
        initial_hashes = parameter_hashes(assembled.model)
    configs = optimizer_configs(config.optimizer)
    param_groups = ParamGroups.of(assembled.model, configs)
    objectives = objectives_of(assembled.task, optimizers=[optimizer_config.name for optimizer_config in configs])
    if objectives is not None:
        setup.strategy.allow_unused_parameters()
    wrapped = _wrap(setup, assembled.model)
    resumed = None
    if checkpoint is not None:
        resumed = load_progress(checkpoint)
    optimizer, schedule = _build_optimizer_and_schedule(
        setup, assembled, param_groups, objectives=objectives, sizes=train_loader.sizes, resumed=resumed
    )

    closure = closure_of(optimizer, begins_with_gradients=any(each.closure for each in configs))
    if closure is not Closure.NONE:
        _check_closure(setup, optimizer, assembled.task)

    callbacks = build_callbacks(_callback_nodes(setup), context=setup.context, run_dir=setup.run_dir)
    for own_callbacks in hooks([assembled.task], "own_callbacks"):
        of_task = own_callbacks()
        check_built_callbacks(of_task, setup.strategy)
        callbacks.update(of_task)
    checkpoint_settings = config.checkpoint
    for checkpoint_keys in hooks([assembled.task], "checkpoint_keys"):
        checkpoint_settings = replace(checkpoint_settings, **checkpoint_keys())
    checkpoints = _checkpoint_manager(setup, checkpoint_settings)

    # Only rank 0 logs.
    logger_nodes = config.logger if setup.context.is_main else {}
    state = TrainState(
        model=wrapped,
        task=assembled.task,
        strategy=setup.strategy,
        precision=assembled.precision,
        optimizer=optimizer,
        schedule=schedule,
        callbacks=callbacks,
        loggers=build_loggers(logger_nodes, run_dir=setup.run_dir, progress=_progress_mode(setup)),
        train_loader=train_loader,
        stop=StopControl(setup.link, context=setup.context),
        context=setup.context,
        objectives=objectives,
        closure=closure,
        recomputes=settings.activation_checkpointing is not None,
        compile_mode=settings.compile,
        initial_hashes=initial_hashes,
    )
    for observe_run in hooks([assembled.task], "observe_run"):
        observe_run(state.loggers, state.callbacks, setup.run_dir.path)
    # From here on, ranks with different samples draw different numbers.
    seed_everything(config.seed, rank=setup.seed_rank)
    groups = (*setup.strategy.groups, *setup.exchange.groups)
    trainer = Trainer(
        state,
        settings,
        val_loaders=val_loaders,
        checkpoints=checkpoints,
        skipped_steps=SkippedSteps.of(config.data, added=_rolled_back(setup)),
        on_skipped=partial(_record_skipped, setup),
        # Until then the time-out is that of `_wrap`.
        after_first_step=partial(set_timeout, config.backend.timeout, setup.context, groups=groups),
        after_validation=partial(
            _after_validation,
            setup,
            train_loader.steps,
            monitors=monitored(config, callbacks=callbacks, checkpoints=checkpoints),
            monitor=checkpoint_settings.monitor,
        ),
        check_run_dir=_run_dir_check(setup),
        link=setup.link,
        counts_flops=bool(config.logger),
    )
    if assembled.initial_weights is not None and checkpoint is None:
        trainer.logbook.log_values({"init_from": Text(assembled.initial_weights)})
    return trainer


def _rolled_back(setup: RankSetup) -> list[int]:
    """Return the steps whose samples are left out since a rollback, by their numbers. Every rank must call it."""
    if setup.config.resume is None and setup.attempt == 0:
        return []
    of_main = []
    if setup.context.is_main:
        of_main = rolled_back_steps(setup.run_dir.read_run())
    numbers: list[int] = broadcast_object(of_main, setup.context)
    return numbers


def _record_skipped(setup: RankSetup, skipped: Sequence[SkippedSamples]) -> None:
    """Log the samples of steps that are passed over, and record them in `run.json`."""
    if not setup.context.is_main:
        return
    entries = {entry["step"]: entry for entry in setup.run_dir.read_run().get("skipped", [])}
    for samples in skipped:
        begin, end = samples.positions
        what = "trained at the end of the epoch" if samples.is_deferred else "skipped"
        warn(
            f"The samples of step {samples.number} are {what}: number {begin} to {end - 1} in the order of epoch "
            f"{samples.epoch}"
        )
        entries[samples.number] = {
            "step": samples.number,
            "epoch": samples.epoch,
            "positions": [begin, end],
            "samples": samples.indices,
            "deferred": samples.is_deferred,
        }
    setup.run_dir.update_run({"skipped": list(entries.values())})


def _run_dir_check(setup: RankSetup) -> Callable[[], None]:
    """Return what raises LostRunDirError once the run directory is gone: on rank 0, which logs and saves there."""
    if not setup.context.is_main:
        return _no_check
    return partial(check_run_dir, setup.run_dir, rank=setup.context.rank)


def _no_check() -> None:
    pass


# The model


def _assemble(setup: RankSetup, train_loader: TrainLoader, *, checkpoint: Path | None) -> Assembled:
    """Return the whole model, in training mode, with its task and precision."""
    assembled = assemble(
        setup.requested,
        setup.context,
        num_stages=setup.strategy.num_stages,
        loads_initial_weights=loads_before_adapters(setup.config, checkpoint),
    )
    model = assembled.model
    if assembled.trains_task and setup.strategy.forward_communicates:
        raise ConfigError(
            f"task: {type(assembled.task).__name__} has parameters that require gradients, and under strategy="
            f"{type(setup.strategy).__name__.lower()} only what the model's forward computes with is trained.\n"
            "Move them to the model, freeze them with requires_grad_(False), or use strategy=ddp or allreduce."
        )
    # Samples that the loader keeps in memory can be shown to the task all at once.
    if train_loader.whole is not None:
        for observe in hooks([assembled.task], "observe_samples"):
            observe(train_loader.whole)
    # Transformers' from_pretrained returns models in evaluation mode. Parts of one in training mode stay as they are.
    if not model.training:
        model.train()
    apply_activation_checkpointing(model, setup.config.trainer.activation_checkpointing)
    return assembled


def _wrap(setup: RankSetup, model: nn.Module) -> nn.Module:
    """Return the module to call in training: wrapped by the strategy, and compiled if that is requested."""
    config = setup.config
    wrapped = setup.strategy.wrap(model)
    # This longer time-out holds until the first step is done, which may compile and connect.
    set_group_timeouts(config.backend.init_timeout, setup.strategy.groups)
    is_small = tensor_bytes(model.parameters()) <= _FIRST_BUCKET_BYTES
    if setup.context.world_size > 1 and is_small:
        let_gloo_finish_messages()
    if config.trainer.compile is not None:
        # In place, so that the names of weights stay as they are.
        wrapped.compile(mode=config.trainer.compile)
    return wrapped


# The optimizer


def _build_optimizer_and_schedule(
    setup: RankSetup,
    assembled: Assembled,
    param_groups: ParamGroups,
    *,
    objectives: Objectives | None,
    sizes: EpochSizes | None,
    resumed: Mapping[str, int] | None,
) -> tuple[Optimizer, Schedule | Schedules]:
    """Return the optimizer of this rank's parameters, or all of several, and its learning-rate schedule.

    Args:
        sizes: Samples of each epoch; None for a stream.
        resumed: The progress of the checkpoint that will be restored.
    """
    # The length is that of the requested run, of which `trainer.fast_dev_run` only makes the first steps.
    requested = setup.requested
    steps = run_length.epoch_steps(requested.trainer, setup.plan, sizes=sizes)
    start = run_length.FROM_SCRATCH
    if resumed is not None:
        start = run_length.start_of(resumed, steps=steps, plan=setup.plan)
    total_steps = run_length.total_steps(requested.trainer, steps=steps, start=start)

    # Fused optimizers take no sparse gradients. With a scaler they skip an overflowing step themselves, and the trainer
    # wouldn't see it.
    has_scaler = assembled.precision.scaler.is_enabled()
    may_fuse = not has_scaler and not _has_sparse_gradients(assembled.model)
    optimizer = build_optimizer(param_groups, assembled.model, may_fuse=may_fuse, total_steps=total_steps)
    if setup.strategy.forward_communicates and has_evaluation_mode(optimizer):
        raise ConfigError(
            f"optimizer: {type(optimizer).__name__} evaluates other weights than those it trains, and strategy="
            f"{type(setup.strategy).__name__.lower()} saves one set.\nUse strategy=ddp or allreduce."
        )
    setup.link.rank_status.set_total_steps(total_steps or 0)
    schedule = build_schedule(
        setup.config.scheduler,
        optimizer,
        param_groups.configs,
        length=partial(run_length.schedule_length, requested, steps, objectives=objectives, start=start),
    )
    return optimizer, schedule


def _check_closure(setup: RankSetup, optimizer: Optimizer, task: Task) -> None:
    """Raise ConfigError if loss and gradients of the global batch can't be computed again and again in a step."""
    name = type(optimizer).__name__
    strategy = setup.strategy
    if isinstance(optimizer, Optimizers):
        raise ConfigError("optimizer: one that computes the loss in its step must be the only one.")
    if setup.config.trainer.precision == "16-mixed":
        raise ConfigError(refuses_scaled_losses("optimizer", name))
    if hasattr(task, "slot_state"):
        raise ConfigError(
            f"optimizer: {name} computes the loss several times in a step, and each time would move on the slot_state "
            f"of {type(task).__name__}. Use another optimizer."
        )
    if strategy.forward_communicates or strategy.replicas_differ:
        raise ConfigError(
            f"optimizer: {name} computes the loss several times in a step, and needs whole gradients each time, which "
            f"strategy={type(strategy).__name__.lower()} doesn't give. Use strategy=ddp or allreduce."
        )


def _has_sparse_gradients(model: nn.Module) -> bool:
    return any(getattr(module, "sparse", False) is True for module in model.modules())


# Observers and checkpoints


def _after_validation(
    setup: RankSetup, steps: EpochSteps | None, info: EvalInfo, *, monitors: Mapping[str, str], monitor: str | None
) -> None:
    """Show the monitored metric in the rank status. Raises ConfigError if one that is monitored is never computed.

    Args:
        steps: of each epoch; None if unknown.
        monitors: what `monitored` returned.
        monitor: that of checkpoints.
    """
    check_metrics(monitors, info.metrics)
    if monitor is not None and monitor in info.metrics:
        number = _validation_number(setup.config.trainer, steps, info)
        setup.link.rank_status.set_validation(number, info.metrics[monitor])


def _validation_number(trainer: TrainerConfig, steps: EpochSteps | None, info: EvalInfo) -> int:
    """Return the number of a validation in its run, from 1. A resumed run continues the count."""
    interval = trainer.val_check_interval
    if isinstance(interval, int):
        return info.step // interval
    every_n_epoch = trainer.check_val_every_n_epoch or 1
    if interval is None or steps is None:
        return (info.epoch + 1) // every_n_epoch
    # Several in an epoch.
    number = 0
    for epoch in range(every_n_epoch - 1, info.epoch, every_n_epoch):
        number += steps.of(epoch) // steps.share(epoch, interval)
    done = info.step - steps.between(0, info.epoch)
    return number + done // steps.share(info.epoch, interval)


def _callback_nodes(setup: RankSetup) -> Mapping[str, Node]:
    """Return the callbacks of the configuration, and the profiler if `trainer.profiler` asks for it."""
    callbacks = setup.config.callbacks
    wanted = setup.config.trainer.profiler
    if wanted is None or "profiler" in callbacks:
        return callbacks
    node = {"_target_": "framework.callbacks.profiler.TorchProfiler", "trace": wanted == "pytorch"}
    return {**callbacks, "profiler": node}


def _progress_mode(setup: RankSetup) -> ProgressMode:
    """Return how progress is shown: as plain lines in a debugger, whose prompt would be overwritten otherwise."""
    progress = setup.config.trainer.progress
    # Nobody watches a rank that a debugger may stop.
    if progress == "auto" and not setup.link.is_watched:
        return "plain"
    return progress


def _checkpoint_manager(setup: RankSetup, settings: CheckpointConfig) -> CheckpointManager | None:
    if not setup.config.checkpoint.enabled:
        return None
    setup.run_dir.checkpoints.mkdir(exist_ok=True)
    backend = setup.config.backend
    shard_group = None
    if setup.strategy.forward_communicates:
        # A group of its own, since checkpoints are written while training uses the others.
        shard_group = new_group(max(backend.init_timeout, backend.timeout))
    return CheckpointManager(
        settings,
        LocalStorage(setup.run_dir.checkpoints),
        config_text=written_config(setup.run_dir),
        is_writer=setup.context.is_main,
        warn=warn,
        shard_group=shard_group,
    )
