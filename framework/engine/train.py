"""What one rank does: read the configuration, join the process group, build, restore, train, test, report."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any

from framework.checkpoint import LocalStorage, read_manifest
from framework.checkpoint.layout import BEST
from framework.checkpoint.manager import CheckpointManager
from framework.checkpoint.reader import load_progress
from framework.config.optimizers import optimizer_configs
from framework.config.saved import written_config
from framework.data.loader import EvalLoader, MapLoader
from framework.data.stream import StreamLoader
from framework.distributed.collectives import broadcast_object
from framework.distributed.process_group import new_group, process_group, set_group_timeouts, set_timeout
from framework.distributed.seed import seed_everything
from framework.engine import build, limits
from framework.engine.assemble import assemble
from framework.engine.overview import introduce, state_sizes
from framework.engine.restore import own_checkpoint, restore
from framework.engine.setup import (
    RankSetup,
    build_data,
    make_eval_loaders,
    make_train_loader,
    setup_rank,
)
from framework.engine.weights import load_model
from framework.errors import EXIT_STOPPED, RunError
from framework.launch.plan import MonitorLink, RankArguments
from framework.launch.stopping import stoppable
from framework.media import markdown_texts
from framework.monitoring.rank_status import RankPhase
from framework.optim.param_groups import ParamGroups
from framework.optim.phases import phases_of
from framework.strategies.activation_checkpointing import apply_activation_checkpointing
from framework.system.files import free_bytes
from framework.system.formatting import format_bytes
from framework.system.rank_log import logger, warn
from framework.training import length as run_length
from framework.training.stop_control import StopControl
from framework.training.train_state import TrainState
from framework.training.trainer import Trainer
from framework.types import Datasets, hooks


def run_rank(
    arguments: RankArguments, link: MonitorLink, *, before_training: Callable[[RankSetup], None] | None = None
) -> int | None:
    """Train on this rank as the run directory's `config.yaml` says. Return EXIT_STOPPED if stopped on request.

    Wrong requests are refused before the process group is made; `before_training` is called right after that.
    Raises FrameworkError for a wrong request, and whatever the user's code raises.
    """
    with setup_rank(arguments, link) as setup:
        datasets, setup = build_data(setup)
        datasets = limits.apply_overfit_batches(datasets, setup.config.trainer, setup.plan)
        if datasets.val is None:
            limits.check_metrics(setup.config, ())
        train_loader = make_train_loader(setup, datasets)
        link.rank_status.set_phase(RankPhase.MEETING)
        on_cpu = setup.strategy.exchanges_on_cpu
        group = process_group(setup.context, setup.config.backend, rendezvous=arguments.rendezvous, with_cpu=on_cpu)
        with group, link.recording():
            if before_training is not None:
                before_training(setup)
            if limits.streams_of(datasets):
                setup.exchange.open()
            link.rank_status.set_phase(RankPhase.BUILDING)
            return _run(setup, datasets, train_loader)


def _run(setup: RankSetup, datasets: Datasets, train_loader: MapLoader | StreamLoader) -> int | None:
    """Build, restore, train, test: inside the process group."""
    val_loaders = make_eval_loaders(setup, datasets, part="val", strategy=setup.strategy)
    test_loaders = make_eval_loaders(setup, datasets, part="test", strategy=setup.strategy)
    own = own_checkpoint(setup)
    progress = None if own.directory is None else load_progress(own.directory)
    trainer = build_trainer(setup, train_loader, val_loaders, resumed=progress)
    try:
        restore(setup, trainer, own)
        steps = train_loader.steps_per_epoch
        unvalidated = limits.check_validation(
            setup.config, datasets, steps_per_epoch=steps, start=trainer.start_of_run()
        )
        if unvalidated is not None and setup.context.is_main:
            warn(unvalidated)
        if setup.context.is_main:
            sizes = state_sizes(setup, trainer)
            _check_disk_space(setup, sizes.checkpoint)
            introduce(setup, trainer, datasets, sizes)
        if names := trainer.sanity_check():
            limits.check_metrics(setup.config, names)
        started = time.perf_counter()
        # Without checkpoints a stop signal just ends the process.
        with nullcontext() if trainer.checkpoints is None else stoppable(setup.link):
            trainer.fit()
        seconds = time.perf_counter() - started
        setup.link.rank_status.set_phase(RankPhase.EVALUATE)
        test = _test(setup, trainer, {} if trainer.stop.on_request else test_loaders)
        setup.link.rank_status.set_phase(RankPhase.CLOSING)
        if setup.context.is_main:
            _report(setup, trainer, test=test, seconds=seconds)
        return EXIT_STOPPED if trainer.stop.on_request else None
    except BaseException as error:
        setup.link.record_failure(error)  # before anything is closed, see `MonitorLink.recording`
        raise
    finally:
        _close(trainer, (train_loader, *val_loaders.values(), *test_loaders.values()), failing=sys.exc_info()[1])


def _close(trainer: Trainer, loaders: Iterable[Any], *, failing: BaseException | None) -> None:
    """Close everything, even if something raises; raise its error unless another one ends the run already."""
    closes = hooks(trainer.state.observers, "close")
    if trainer.checkpoints is not None:
        closes.append(trainer.checkpoints.close)
    closes += hooks(trainer.state.loggers.values(), "close")
    closes += [loader.close for loader in loaders]
    first: Exception | None = None
    for close in closes:
        try:
            close()
        except Exception as error:  # the user's code may raise anything
            logger.warning("%s failed", getattr(close, "__qualname__", close), exc_info=error)
            first = first or error
    if first is not None and failing is None:
        raise first


def build_trainer(
    setup: RankSetup,
    train_loader: MapLoader | StreamLoader,
    val_loaders: Mapping[str, EvalLoader],
    *,
    resumed: Mapping[str, int] | None = None,
) -> Trainer:
    """Build the model, the optimizer and all else that training needs. Every rank must call it.

    resumed: the progress of the checkpoint that will be restored, which decides how long the whole run is.
    """
    config, context = setup.config, setup.context
    # The same on every rank: replicas start equal, even if the strategy doesn't make them so.
    seed_everything(config.seed, rank=0)
    settings = config.trainer
    assembled = assemble(setup.requested, context, num_stages=setup.strategy.num_stages)
    model = assembled.model
    task = assembled.task
    if train_loader.whole is not None:
        for observe in hooks([task], "observe_samples"):
            observe(train_loader.whole)
    if not model.training:  # as transformers' from_pretrained returns it; parts of it may be in evaluation mode
        model.train()
    apply_activation_checkpointing(model, settings.activation_checkpointing)
    configs = optimizer_configs(config.optimizer)
    param_groups = ParamGroups.of(model, configs)  # before strategies that leave each rank a part of it
    phases = phases_of(task, optimizers=[each.name for each in configs])
    if phases is not None:
        setup.strategy.allow_unused_parameters()
    wrapped = setup.strategy.wrap(model)
    set_group_timeouts(config.backend.init_timeout, setup.strategy.groups)
    if settings.compile is not None:
        wrapped.compile(mode=settings.compile)  # in place: names of weights stay as they are
    # Fused optimizers take no sparse gradients, and skip a step that overflows unseen.
    is_sparse = any(getattr(module, "sparse", False) is True for module in model.modules())
    may_fuse = not assembled.precision.scaler.is_enabled() and not is_sparse
    # The schedule is that of the requested run, of which `trainer.fast_dev_run` only makes the first steps.
    steps = run_length.steps_per_epoch(setup.requested.trainer, setup.plan, size=train_loader.size)
    start = run_length.FROM_SCRATCH
    if resumed is not None:
        start = run_length.start_of(
            resumed,
            size=train_loader.size,
            steps_per_epoch=steps,
            plan=setup.plan,
        )
    total = run_length.total_steps(setup.requested.trainer, steps_per_epoch=steps, start=start)
    optimizer = build.build_optimizer(param_groups, model, may_fuse=may_fuse, total_steps=total)
    length = partial(run_length.schedule_length, setup.requested, steps, phases=phases, start=start)
    callbacks, loggers = config.callbacks, config.logger if context.is_main else {}
    # Redrawn lines would disturb a debugger's prompt.
    progress = "plain" if settings.progress == "auto" and not setup.link.is_watched else settings.progress
    if settings.profiler is not None and "profiler" not in callbacks:
        callbacks = {**callbacks, "profiler": {"_target_": "framework.callbacks.profiler.TorchProfiler"}}
    state = TrainState(
        model=wrapped,
        task=task,
        strategy=setup.strategy,
        precision=assembled.precision,
        optimizer=optimizer,
        schedule=build.build_schedule(config.scheduler, optimizer, configs, length=length),
        callbacks=build.build_callbacks(callbacks, context=context, run_dir=setup.run_dir),
        loggers=build.build_loggers(loggers, run_dir=setup.run_dir, progress=progress),
        train_loader=train_loader,
        stop=StopControl(setup.link, context=context),
        context=context,
        phases=phases,
        recomputes=settings.activation_checkpointing is not None,
        compile_mode=settings.compile,
    )
    seed_everything(config.seed, rank=setup.seeded_as)
    return Trainer(
        state,
        config.trainer,
        val_loaders=val_loaders,
        checkpoints=_checkpoints(setup),
        after_first_step=partial(
            set_timeout, config.backend.timeout, context, groups=(*setup.strategy.groups, *setup.exchange.groups)
        ),
        check_metrics=partial(limits.check_metrics, config),
        link=setup.link,
        counts_flops=bool(config.logger),
    )


def _checkpoints(setup: RankSetup) -> CheckpointManager | None:
    if not setup.config.checkpoint.enabled:
        return None
    setup.run_dir.checkpoints.mkdir(exist_ok=True)
    backend = setup.config.backend
    timeout_s = max(backend.init_timeout, backend.timeout)
    return CheckpointManager(
        setup.config.checkpoint,
        LocalStorage(setup.run_dir.checkpoints),
        config_text=written_config(setup.run_dir),
        is_writer=setup.context.is_main,
        warn=warn,
        # A group of its own, since checkpoints are written while training uses the others.
        shard_group=new_group(timeout_s) if setup.strategy.forward_communicates else None,
    )


def _check_disk_space(setup: RankSetup, checkpoint_bytes: int) -> None:
    """Raise RunError if the disk has no room for one checkpoint. A disk that fills up later is reported."""
    folder = setup.run_dir.checkpoints
    free = free_bytes(folder) if setup.config.checkpoint.enabled else None
    if free is not None and free < checkpoint_bytes:
        raise RunError(
            f"There is no room for a checkpoint: one takes about {format_bytes(checkpoint_bytes)}, and "
            f"{format_bytes(free)} are free in {folder}.\nMake room, choose another disk with path.outputs=FOLDER, or "
            "train without checkpoints: checkpoint=none"
        )


def _test(setup: RankSetup, trainer: Trainer, loaders: Mapping[str, EvalLoader]) -> dict[str, Any] | None:
    """Evaluate the test part with the best weights, or the last if there are none. Every rank must call it.

    Returns:
        `step` of the weights and `metrics`, for the results; None without a test part.
    """
    if not loaders:
        return None
    step: int | None = trainer.progress.step
    with_media = bool(trainer.state.loggers)
    best, is_ranked = setup.run_dir.checkpoints / BEST, trainer.checkpoints is not None and trainer.checkpoints.monitor
    if is_ranked and broadcast_object(best.exists(), setup.context):
        manifest = read_manifest(load_model(trainer.state.bare_model, best, context=setup.context))
        step = manifest.step
        _set_epoch(loaders, manifest.epoch)
        found = trainer.state.evaluate(loaders, with_media=with_media)
    else:
        _set_epoch(loaders, trainer.progress.last_epoch)
        with trainer.state.evaluation_weights():
            found = trainer.state.evaluate(loaders, with_media=with_media)
    results = setup.run_dir.read_run().get("results", {})
    # A run that is resumed after its end has logged this test already.
    if results.get("test") is None or results.get("steps") != trainer.progress.step:
        trainer.logbook.log_values(found.metrics)
        trainer.logbook.log_values(found.texts)
        trainer.logbook.log_values(found.media)
    return {"step": step, "metrics": found.metrics, "texts": markdown_texts(found.texts)}


def _set_epoch(loaders: Mapping[str, EvalLoader], epoch: int) -> None:
    for loader in loaders.values():
        loader.set_epoch(epoch)


def _report(setup: RankSetup, trainer: Trainer, *, test: dict[str, Any] | None, seconds: float) -> None:
    """Write the results to `run.json`, where the parent reads them for the closing summary; give them to the loggers.

    `best` and `last` are validations; they and `test` have the step of their weights.
    """
    progress, state = trainer.progress, trainer.state
    best = None if trainer.checkpoints is None else trainer.checkpoints.best
    max_epochs = setup.config.trainer.max_epochs
    reached = "max_epochs" if max_epochs is not None and progress.epoch >= max_epochs else "max_steps"
    ended_by = trainer.stop.reason or f"trainer.{reached} reached"
    if trainer.stop.on_request:
        ended_by = f"stopped on request ({trainer.stop.stopped_by})"
    last = {"step": state.val_step, "metrics": state.val_metrics, "texts": markdown_texts(state.val_texts)}
    results = {
        "steps": progress.step,
        "epochs": progress.epoch,
        "seconds": seconds,
        "ended_by": ended_by,
        "score": None if best is None else best.metrics[str(setup.config.checkpoint.monitor)],
        "best": None if best is None else {"step": best.step, "metrics": best.metrics},
        "last": None if state.val_step is None else last,
        "test": test,
        "slow_ranks": [asdict(each) for each in trainer.logbook.slow_ranks.found()],
    }
    setup.run_dir.update_run({"results": results})
    if trainer.stop.on_request:
        return
    final = dict(state.val_metrics) | ({} if test is None else test["metrics"])
    if best is not None:
        final[f"best/{setup.config.checkpoint.monitor}"] = best.metrics[str(setup.config.checkpoint.monitor)]
    for record in hooks(state.loggers.values(), "on_results"):
        record(final)
