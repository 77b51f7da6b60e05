"""What one rank of a training does, from top to bottom: set up, data, assemble, restore, overview, fit, test, close."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import nn

from framework.checkpoint import find, read_manifest
from framework.checkpoint.layout import BEST
from framework.data.loader import EvalLoader, TrainLoader
from framework.distributed.collectives import broadcast_object
from framework.distributed.process_group import process_group
from framework.distributed.seed import generator_states, restore_generator_states
from framework.engine.assemble import assemble
from framework.engine.build_trainer import build_trainer
from framework.engine.builders.model import check_validation_step
from framework.engine.data_checks import check_metrics, check_validation, monitored, streams_of
from framework.engine.limits import apply_overfit_batches
from framework.engine.loaders import make_eval_loaders, make_train_loader, prepare_data
from framework.engine.out_of_memory import memory_at_failure
from framework.engine.overview import introduce
from framework.engine.own_checkpoint import own_checkpoint
from framework.engine.restore import restore
from framework.engine.results import write_results
from framework.engine.setup import RankSetup, setup_rank
from framework.engine.state_bytes import state_sizes
from framework.engine.weights import load_model, load_task
from framework.errors import EXIT_STOPPED, RunError
from framework.launch.child import show_status
from framework.launch.plan import MonitorLink, RankArguments
from framework.launch.stopping import TestStoppedError, stoppable, stoppable_test
from framework.media import markdown_texts
from framework.monitoring.rank_status import RankPhase
from framework.runs.segments import record_segment
from framework.system.files import free_bytes
from framework.system.formatting import format_bytes
from framework.system.loaded_modules import hashes_of_loaded_modules
from framework.system.rank_log import logger, warn
from framework.training.evaluation import Evaluation
from framework.training.trainer import Trainer
from framework.types import Datasets, described_hook, hooks


def run_rank(
    arguments: RankArguments,
    link: MonitorLink,
    *,
    before_training: Callable[[RankSetup], None] | None = None,
    before_fit: Callable[[Trainer], None] | None = None,
) -> int | None:
    """Train on this rank as the run directory's `config.yaml` says. Return EXIT_STOPPED if stopped on request.

    Wrong requests are refused before the process group is made; `before_training` is called right after that, and
    `before_fit` with the trainer, once the checkpoint is restored.
    Raises FrameworkError for a wrong request, and whatever the user's code raises.
    """
    with setup_rank(arguments, link) as setup:
        _show_status(setup, "Loading the data …")
        # The set-up changes too, if the data decides the batch sizes.
        datasets, setup = prepare_data(setup)
        datasets = apply_overfit_batches(datasets, setup.config.trainer, setup.plan)
        if datasets.val is None:
            # Refuse a configuration that monitors a metric: none will be computed.
            check_metrics(monitored(setup.config), ())
        train_loader = make_train_loader(setup, datasets)

        link.rank_status.set_phase(RankPhase.MEETING)
        _show_status(setup, "Waiting for the other processes …")
        group = process_group(
            setup.context,
            setup.config.backend,
            rendezvous=arguments.rendezvous,
            with_cpu=setup.strategy.exchanges_on_cpu,
        )
        with group, link.recording(), ExitStack() as stack:
            if before_training is not None:
                before_training(setup)
            if streams_of(datasets):
                setup.exchange.open()
            link.rank_status.set_phase(RankPhase.BUILDING)
            _show_status(setup, "Building the model …")
            return _train(setup, datasets, train_loader, before_fit=before_fit, stack=stack)


def _show_status(setup: RankSetup, text: str) -> None:
    if setup.config.trainer.progress in ("auto", "rich"):
        show_status(text)


def _train(
    setup: RankSetup,
    datasets: Datasets,
    train_loader: TrainLoader,
    *,
    before_fit: Callable[[Trainer], None] | None,
    stack: ExitStack,
) -> int | None:
    """Assemble, restore, fit, test and close, inside the process group.

    From `fit` until `stack` is left, a signal to stop is only noted, so that it can't interrupt the closing.
    """
    val_loaders = make_eval_loaders(setup, datasets, part="val", strategy=setup.strategy)
    test_loaders: Mapping[str, EvalLoader] = {}
    if not setup.skips_test:
        test_loaders = make_eval_loaders(setup, datasets, part="test", strategy=setup.strategy)

    checkpoint = own_checkpoint(setup)
    trainer = build_trainer(setup, train_loader, val_loaders, checkpoint=checkpoint.directory)
    try:
        check_validation_step(trainer.state.task, [*val_loaders, *test_loaders])
        restore(setup, trainer, checkpoint)
        _warn_if_never_validated(setup, trainer, datasets)
        if setup.context.is_main:
            sizes = state_sizes(setup, trainer)
            _check_disk_space(setup, sizes.checkpoint)
            introduce(setup, trainer, datasets, sizes)
        _show_status(setup, "Checking the validation …")
        metric_names = trainer.sanity_check()
        if metric_names:
            monitors = monitored(setup.config, callbacks=trainer.state.callbacks, checkpoints=trainer.checkpoints)
            check_metrics(monitors, metric_names)

        if setup.context.is_main:
            # The files of modules may be edited while it runs.
            modules = hashes_of_loaded_modules()
            record_segment(setup.run_dir, step=trainer.progress.step, attempt=setup.attempt, modules=modules)

        # Without checkpoints a stop signal just ends the process.
        if trainer.checkpoints is not None:
            stack.enter_context(stoppable(setup.link))
        if before_fit is not None:
            before_fit(trainer)
        started = time.perf_counter()
        trainer.fit()
        seconds = time.perf_counter() - started

        setup.link.rank_status.set_phase(RankPhase.EVALUATE)
        test_results = None
        if test_loaders and not trainer.stop.on_request:
            try:
                test_results = _test(setup, trainer, test_loaders)
            except TestStoppedError:
                trainer.stop.note_stopped_test()

        setup.link.rank_status.set_phase(RankPhase.CLOSING)
        # Otherwise the results would go to a new directory of the same name.
        trainer.check_run_dir()
        trainer.logbook.log_drawings()
        if setup.context.is_main:
            write_results(
                setup,
                trainer,
                test=test_results,
                is_untested=setup.skips_test and datasets.test is not None,
                seconds=seconds,
            )
        if trainer.stop.on_request:
            return EXIT_STOPPED
        return None
    except BaseException as error:
        # Recorded before anything is closed; see `MonitorLink.recording`.
        snapshot = setup.run_dir.logs / f"memory_rank_{setup.context.rank}.pickle"
        memory = memory_at_failure(error, trainer, snapshot=snapshot)
        setup.link.record_failure(error, memory=memory)
        raise
    finally:
        loaders = [train_loader, *val_loaders.values(), *test_loaders.values()]
        _close(trainer, loaders, failing=sys.exc_info()[1])


def _warn_if_never_validated(setup: RankSetup, trainer: Trainer, datasets: Datasets) -> None:
    """Warn if training ends before the first validation is due."""
    warning = check_validation(
        setup.config,
        datasets,
        steps=trainer.train_loader.steps,
        start=trainer.start_of_run(),
    )
    if warning is not None and setup.context.is_main:
        warn(warning)


def _check_disk_space(setup: RankSetup, checkpoint_bytes: int) -> None:
    """Raise RunError if the disk has no room for one checkpoint. A disk that fills up later is reported."""
    if not setup.config.checkpoint.enabled:
        return
    folder = setup.run_dir.checkpoints
    free = free_bytes(folder)
    if free is not None and free < checkpoint_bytes:
        raise RunError(
            f"There is no room for a checkpoint: one takes about {format_bytes(checkpoint_bytes)}, and "
            f"{format_bytes(free)} are free in {folder}.\nMake room, choose another disk with path.outputs=FOLDER, or "
            "train without checkpoints: checkpoint=none"
        )


def _test(setup: RankSetup, trainer: Trainer, loaders: Mapping[str, EvalLoader]) -> dict[str, Any]:
    """Evaluate the test part with the best weights, or the last if there are none. Every rank must call it.

    Returns:
        `step` of the weights, `metrics` and `texts`, for the results.

    Raises:
        TestStoppedError: a stop was requested.
    """
    if _has_best_checkpoint(setup, trainer):
        best = setup.run_dir.checkpoints / BEST
        load_model(trainer.state.bare_model, best, context=setup.context, rebuild=partial(_rebuild_model, setup))
        directory = find(best)
        load_task(trainer.state.task, trainer.state.bare_model, directory)
        manifest = read_manifest(directory)
        step = manifest.step
        evaluation = _evaluate_test(setup, trainer, loaders, epoch=manifest.epoch)
    else:
        step = trainer.progress.step
        with trainer.state.evaluation_weights():
            evaluation = _evaluate_test(setup, trainer, loaders, epoch=trainer.progress.last_epoch)

    setup.link.rank_status.set_phase(RankPhase.LOGGING)
    trainer.check_run_dir()
    # A run that is resumed after its end has logged this test already; resumed from an earlier step, it has lost that.
    results = setup.run_dir.read_run().get("results", {})
    ended_here = results.get("steps") == trainer.progress.step == trainer.start_step
    if results.get("test") is None or not ended_here:
        trainer.logbook.log_evaluation(evaluation)
    return {"step": step, "metrics": evaluation.metrics, "texts": markdown_texts(evaluation.texts)}


def _rebuild_model(setup: RankSetup) -> nn.Module:
    """Return the model as it was before the first step, and leave the generators as they are."""
    generators = generator_states(setup.context.devices)
    model = assemble(setup.requested, setup.context, loads_initial_weights=True).model
    restore_generator_states(generators, devices=setup.context.devices)
    return model


def _has_best_checkpoint(setup: RankSetup, trainer: Trainer) -> bool:
    """Return True if checkpoints are ranked by a metric and there is a best one on rank 0's disk."""
    if trainer.checkpoints is None or not trainer.checkpoints.monitor:
        return False
    exists: bool = broadcast_object((setup.run_dir.checkpoints / BEST).exists(), setup.context)
    return exists


def _evaluate_test(setup: RankSetup, trainer: Trainer, loaders: Mapping[str, EvalLoader], *, epoch: int) -> Evaluation:
    """Evaluate the weights that the bare model holds, which are those of `epoch`."""
    state = trainer.state
    for loader in loaders.values():
        loader.set_epoch(epoch)
    with stoppable_test(trainer.stop.request, link=setup.link) as until_stopped:
        return state.evaluate(
            {prefix: until_stopped(loader) for prefix, loader in loaders.items()},
            with_media=bool(state.loggers),
            inference_mode=setup.config.trainer.inference_mode,
        )


def _close(trainer: Trainer, loaders: Iterable[Any], *, failing: BaseException | None) -> None:
    """Close everything, even if something raises; raise its error unless another one ends the run already."""
    closes = hooks(trainer.state.observers, "close")
    if trainer.checkpoints is not None:
        closes.append(trainer.checkpoints.close)
    closes.append(trainer.logbook.close)
    closes += hooks(trainer.state.loggers.values(), "close")
    closes += [loader.close for loader in loaders]

    errors = []
    for close in closes:
        try:
            close()
        except Exception as error:
            # The user's code may raise anything.
            logger.warning("%s failed", described_hook(close), exc_info=error)
            errors.append(error)
    if errors and failing is None:
        raise errors[0]
