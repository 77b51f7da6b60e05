"""One rank's life: who am I, meet the others, build, restore, train, test, leave."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from framework import build
from framework.activations import recompute
from framework.checkpoint import CheckpointManager
from framework.checkpoint.format import BEST, step_of
from framework.checkpoint.whole import damage
from framework.config.schema import Config, Interval, Node
from framework.config.suggest import did_you_mean, nearest
from framework.data.loader import EvalLoader, TrainLoader, dataset_size
from framework.data.sampler import GlobalOrder
from framework.data.stream_loader import StreamEvalLoader, StreamLoader
from framework.distributed.collectives import gather_to_all
from framework.distributed.context import Context
from framework.distributed.group import limit_groups, process_group, set_timeout, side_group
from framework.distributed.stages import num_parameters
from framework.errors import EXIT_STOPPED, ConfigError
from framework.evaluator import evaluate
from framework.hardware import Sharers, keep_to_cores, share_of_cores
from framework.headroom import check_room
from framework.launch.link import Link
from framework.launch.plan import RankArguments
from framework.launch.report import FailureReport
from framework.launch.stopping import stoppable
from framework.limits import overfitted, steps_per_epoch, total_steps, train_windows
from framework.misfit import misfit
from framework.parts import Parts
from framework.precision import PrecisionPlugin
from framework.preflight.running import before_training
from framework.progress import hooks
from framework.pulse import Phase
from framework.rank_log import logger
from framework.rank_log import warn as _warn
from framework.restoring import restore
from framework.seed import seed_everything
from framework.session import (
    Rank,
    core_sharers,
    entered,
    eval_loader,
    load_model,
    loading,
    open_for_streams,
    stream_loader,
)
from framework.streams import check_streams, streams_of
from framework.trainer import Trainer
from framework.types import (
    Datasets,
    MapDataset,
    exchanges_on_cpu,
    forward_communicates,
    num_stages,
    own_groups,
)

if TYPE_CHECKING:
    from framework.checkpoint.together import Together


_Loader = TrainLoader | StreamLoader | EvalLoader | StreamEvalLoader


def run_rank(arguments: RankArguments, link: Link) -> int | None:
    """Train as the run directory's `config.yaml` says, on this rank; gives EXIT_STOPPED where it was asked to stop.

    What can be wrong with the request is found before the process group is made. Raises FrameworkError for it, and
    passes what the user's code raises.
    """
    with entered(arguments, link) as rank:
        datasets = build.build_datasets(rank.config.data.datasets)
        check_streams(rank.config, datasets, rank.strategy)
        datasets = overfitted(datasets, rank.config.trainer, rank.plan)
        check_monitors(rank.config, datasets)
        train_loader = _train_loader(rank, datasets.train)
        unvalidated = check_validation(rank.config, datasets, steps_per_epoch=train_loader.steps_per_epoch)
        if unvalidated is not None and rank.context.is_main:
            _warn(unvalidated)
        link.pulse.at(Phase.MEETING)
        on_cpu = exchanges_on_cpu(rank.strategy)
        with process_group(rank.context, rank.config.backend, rendezvous=arguments.rendezvous, with_cpu=on_cpu):
            before_training(rank)
            open_for_streams(rank, datasets)
            link.pulse.at(Phase.BUILDING)
            return _run(rank, datasets, train_loader)


def check_monitors(config: Config, datasets: Datasets) -> None:
    """Raise ConfigError if a metric is monitored and there is no validation part."""
    if datasets.val is not None:
        return
    for key, metric in _monitored(config).items():
        raise ConfigError(
            f"{key}={metric} is never known: data.datasets has no validation part.\n"
            f"Add one, or remove what monitors the metric ({key}=null for a checkpoint)."
        )


def check_validation(config: Config, datasets: Datasets, *, steps_per_epoch: int | None) -> str | None:
    """Return a warning if training ends before the first validation is due at the end of an epoch.

    Raises ConfigError if `trainer.val_check_interval` is larger than the number of steps of the run.
    """
    settings, steps = config.trainer, total_steps(config.trainer, steps_per_epoch=steps_per_epoch)
    if datasets.val is None or settings.limit_val_batches == 0 or steps is None:
        return None
    interval, every = settings.val_check_interval, settings.check_val_every_n_epoch
    if interval is not None and interval > steps:
        raise ConfigError(
            f"trainer.val_check_interval={interval}: training ends after {steps} steps, so nothing would be "
            f"validated.\nUse {steps} or less, or trainer.limit_val_batches=0 to train without validation."
        )
    if interval is not None or every is None or steps_per_epoch is None or isinstance(datasets.train, IterableDataset):
        return None  # a stream's epochs may be shorter
    if every * steps_per_epoch <= steps:
        return None
    unknown = "".join(f" {key}={metric} is never known." for key, metric in _monitored(config).items())
    return (
        f"Nothing will be validated: training ends after {steps} steps, and the first validation is due after "
        f"{every * steps_per_epoch}.{unknown} Use trainer.val_check_interval={steps} to validate at the end."
    )


def check_metrics(config: Config, metrics: Sequence[str]) -> None:
    """Raise ConfigError if a monitored metric isn't one of `metrics`, which validation computes."""
    for key, metric in _monitored(config).items():
        if metric not in metrics:
            raise ConfigError(
                f"{key}={metric}: validation gives no such metric. Use one of {', '.join(metrics)}."
                f"{did_you_mean(nearest(metric, metrics))}"
            )


def _monitored(config: Config) -> dict[str, str]:
    """Return the metrics that are monitored, by config key."""
    watched = {"scheduler.monitor": config.scheduler.monitor}
    if config.checkpoint.enabled:
        watched["checkpoint.monitor"] = config.checkpoint.monitor
    watched |= {f"callbacks.{name}.monitor": node.get("monitor") for name, node in config.callbacks.items()}
    return {key: metric for key, metric in watched.items() if metric is not None}


def _run(rank: Rank, datasets: Datasets, train_loader: TrainLoader | StreamLoader) -> int | None:
    """Build, restore, train, test: inside the process group."""
    settings = rank.config.trainer
    how = rank.strategy
    val_loader = eval_loader(rank, datasets.val, part="val", limit=settings.limit_val_batches, strategy=how)
    test_loader = eval_loader(rank, datasets.test, part="test", limit=settings.limit_test_batches, strategy=how)
    trainer = build_trainer(rank, train_loader, val_loader)
    try:
        restore(rank, trainer)
        check_room(rank, trainer)
        if rank.context.is_main:
            _introduce(rank, trainer, datasets)
        if rank.config.trainer.cpu_affinity:
            _keep_to_own_cores(core_sharers(rank.config, rank.context))
        if names := trainer.sanity_check():
            check_metrics(rank.config, names)
        started = time.perf_counter()
        with _heeding_requests(rank, trainer):
            trainer.fit()
        seconds = time.perf_counter() - started
        rank.link.pulse.at(Phase.EVALUATE)
        test = _test(rank, trainer, None if trainer.ending.was_stopped else test_loader)
        rank.link.pulse.at(Phase.CLOSING)
        if rank.context.is_main:
            _report(rank, trainer, test=test, seconds=seconds)
        return EXIT_STOPPED if trainer.ending.was_stopped else None
    except BaseException as error:
        if trainer.checkpoints is not None:
            trainer.checkpoints.abandon()
        # Under a debugger the error is raised as it is.
        if rank.link.is_watched and trainer.progress.step == trainer.start_step:
            explained = misfit(error, trainer.parts.bare_model, rank.config)
            if explained is not None:
                raise explained from error
        raise
    finally:
        _close(trainer, (train_loader, val_loader, test_loader), failing=sys.exc_info()[1])


def _close(trainer: Trainer, loaders: Iterable[_Loader | None], *, failing: BaseException | None) -> None:
    """Close all there is, whatever one raises: its error, unless it would hide the one that ends the run."""
    closes = hooks(trainer.parts.callbacks.values(), "close")
    closes += [
        each.close for each in (trainer.checkpoints, *trainer.parts.loggers.values(), *loaders) if each is not None
    ]
    first: Exception | None = None
    for close in closes:
        try:
            close()
        except Exception as error:  # the user's code may raise anything
            logger.warning("%s failed", getattr(close, "__qualname__", close), exc_info=error)
            first = first or error
    if first is not None and failing is None:
        raise first


def _heeding_requests(rank: Rank, trainer: Trainer) -> AbstractContextManager[None]:
    """Training may be asked to stop where something is saved; elsewhere a signal just ends it."""
    return nullcontext() if trainer.checkpoints is None else stoppable(rank.link)


def _keep_to_own_cores(sharers: Sharers) -> None:
    """Not earlier: by the cores of the node it is counted how many threads and loader workers a process gets."""
    if not hasattr(os, "sched_setaffinity"):
        return _warn("trainer.cpu_affinity=true is ignored: this system can't bind processes to cores.")
    own = share_of_cores(os.sched_getaffinity(0), local_rank=sharers.own, processes=sharers.number)
    if not own:
        return _warn(
            f"trainer.cpu_affinity=true is ignored: there are fewer cores than the {sharers.number} processes."
        )
    return keep_to_cores(own)


def _train_loader(rank: Rank, dataset: MapDataset | IterableDataset[Any]) -> TrainLoader | StreamLoader:
    return stream_loader(rank, dataset) if isinstance(dataset, IterableDataset) else build_train_loader(rank, dataset)


def build_train_loader(rank: Rank, dataset: MapDataset) -> TrainLoader:
    config = rank.config
    size = dataset_size(dataset, part="train")
    shuffle = config.data.shuffle and config.trainer.overfit_batches is None
    return TrainLoader(
        dataset,
        order=GlobalOrder(size, seed=config.seed, shuffle=shuffle),
        plan=rank.plan,
        rank=rank.data_share.rank,
        device=rank.context.device,
        loading=loading(rank),
        limit=train_windows(config.trainer, rank.plan, size=size),
    )


def build_trainer(
    rank: Rank, train_loader: TrainLoader | StreamLoader, val_loader: EvalLoader | StreamEvalLoader | None
) -> Trainer:
    config, context = rank.config, rank.context
    # The same on every rank: replicas begin equal, whether or not the strategy makes them so.
    seed_everything(config.seed, rank=0)
    settings = config.trainer
    precision = PrecisionPlugin(settings.precision, device=context.device, channels_last=settings.channels_last)
    stages = num_stages(rank.strategy)
    model = precision.convert_model(build.build_model(config.model, context=context, num_stages=stages))
    recompute(model, settings.activation_checkpointing)
    wrapped = rank.strategy.wrap(model)
    limit_groups(config.backend.init_timeout, own_groups(rank.strategy))
    if settings.compile is not None:
        wrapped.compile(mode=settings.compile.value)  # in place: names of weights stay as they are
    # Fused optimizers take no sparse gradients, and leave out an overflowing step unseen.
    is_sparse = any(getattr(module, "sparse", False) is True for module in model.modules())
    may_fuse = not precision.scaler.is_enabled() and not is_sparse
    optimizer = build.build_optimizer(config.optimizer, model.parameters(), may_fuse=may_fuse)
    parts = Parts(
        model=wrapped,
        task=precision.convert_task(build.build_task(config.task)),
        strategy=rank.strategy,
        precision=precision,
        optimizer=optimizer,
        schedule=build.build_scheduler(config.scheduler, optimizer, _schedule_length(rank, train_loader)),
        callbacks=build.build_callbacks(with_profiler(config), context=context, run_dir=rank.run_dir),
        loggers=build.build_loggers(config.logger, run_dir=rank.run_dir, redraws=rank.link.is_watched)
        if context.is_main
        else {},
    )
    seed_everything(config.seed, rank=context.rank)
    return Trainer(
        parts,
        config.trainer,
        context=context,
        train_loader=train_loader,
        val_loader=val_loader,
        checkpoints=_checkpoints(rank),
        after_first_step=partial(
            set_timeout, config.backend.timeout, context, groups=(*own_groups(rank.strategy), *rank.exchange.groups)
        ),
        link=rank.link,
    )


def with_profiler(config: Config) -> dict[str, Node]:
    """The callbacks' nodes, with the profiler's where `trainer.profiler` asks for one and none is among them."""
    if config.trainer.profiler is None or "profiler" in config.callbacks:
        return config.callbacks
    return {**config.callbacks, "profiler": {"_target_": "framework.callbacks.profiler.TorchProfiler"}}


def _schedule_length(rank: Rank, train_loader: TrainLoader | StreamLoader) -> int | None:
    """Return `schedule_length` of the requested run, of which `trainer.fast_dev_run` runs only the first steps."""
    settings = rank.requested.trainer
    return schedule_length(rank.requested, steps_per_epoch(settings, rank.plan, size=train_loader.size))


def schedule_length(config: Config, per_epoch: int | None) -> int | None:
    """Return how often a scheduler of this interval moves in the whole run; None if that isn't known.

    per_epoch: optimizer steps of an epoch, None if unknown.
    """
    steps = total_steps(config.trainer, steps_per_epoch=per_epoch)
    if config.scheduler.interval is Interval.EPOCH and per_epoch is None:
        return config.trainer.max_epochs
    if steps is None or per_epoch is None or config.scheduler.interval is Interval.STEP:
        return steps
    return -(-steps // per_epoch)


def _checkpoints(rank: Rank) -> CheckpointManager | None:
    if not rank.config.checkpoint.enabled:
        return None
    rank.run_dir.checkpoints.mkdir(exist_ok=True)
    return CheckpointManager(
        rank.config.checkpoint,
        rank.run_dir.checkpoints,
        config_text=rank.run_dir.config_file.read_text(),
        is_writer=rank.context.is_main,
        warn=_warn,
        together=_together(rank),
    )


def _together(rank: Rank) -> Together | None:
    """For writing what is spread over the ranks: through a group of its own, beside the one that training uses."""
    if not forward_communicates(rank.strategy):
        return None
    from framework.checkpoint.together import Together  # takes most of a second to import

    group = side_group(max(rank.config.backend.init_timeout, rank.config.backend.timeout))
    return Together(group, holds_own=num_stages(rank.strategy) is not None)


def _test(rank: Rank, trainer: Trainer, loader: EvalLoader | StreamEvalLoader | None) -> dict[str, Any] | None:
    """Evaluate the test part with the best weights, else with the last ones. Every rank must call it.

    Returns:
        `step` of the weights and `metrics`, for the results; None without a test part.
    """
    if loader is None:
        return None
    step: int | None = trainer.progress.step
    best = _best_checkpoint(rank, trainer)
    if best is not None:
        step = step_of(load_model(rank, trainer.parts.bare_model, best).name)
    with nullcontext() if best is not None else trainer.parts.evaluation_weights():
        metrics = evaluate(
            trainer.parts.bare_model,
            loader,
            task=trainer.parts.task,
            precision=trainer.parts.precision,
            context=rank.context,
            prefix="test",
        )
    if not _is_reported(rank, trainer):
        for each in trainer.parts.loggers.values():
            each.metrics(metrics, step=trainer.progress.step, epoch=trainer.last_epoch)
    return _at(step, metrics)


def _best_checkpoint(rank: Rank, trainer: Trainer) -> Path | None:
    """The one to test; None without one, and where it is damaged, which is told. Every rank must call it."""
    if trainer.checkpoints is None or trainer.checkpoints.monitor is None:
        return None
    best = rank.run_dir.checkpoints / BEST
    seen = best.exists(), damage(best.resolve()) if rank.context.is_main and best.exists() else None
    is_there, fault = gather_to_all(seen, rank.context)[0]
    if fault is not None and rank.context.is_main:
        _warn(f"The best checkpoint {best.resolve()} is damaged: {fault}. The last weights are tested instead.")
    return best if is_there and fault is None else None


def _is_reported(rank: Rank, trainer: Trainer) -> bool:
    """Whether the test of this step is in the results, and so in the logs, already: the run had come to its end."""
    results = rank.run_dir.read_run().get("results", {})
    return results.get("test") is not None and results.get("steps") == trainer.progress.step


def _introduce(rank: Rank, trainer: Trainer, datasets: Datasets) -> None:
    """Show what is about to train, and give the loggers the config."""
    context, parts = rank.context, trainer.parts
    steps = trainer.train_loader.steps_per_epoch
    per_epoch = "an unknown number of" if steps is None else steps
    parameters = num_parameters(parts.bare_model)
    print(
        f"{type(parts.bare_model).__name__} with {parameters:,} parameters on {_named(context)} ({context.backend})\n"
        f"{_counted(datasets)}; global batch {rank.plan.global_batch_size}, {per_epoch} steps an epoch",
        flush=True,
    )
    if rank.attempt:
        _tell_restart(rank, trainer)
    elif trainer.progress.step:
        print(f"Resuming {_place(trainer)}", flush=True)
    for each in parts.loggers.values():
        each.text("config", rank.run_dir.config_file.read_text())


def _counted(datasets: Datasets) -> str:
    there = {name: part for name, part in datasets._asdict().items() if part is not None}
    streams = streams_of(datasets)
    told = ", ".join(f"{name} a stream" if name in streams else f"{name} {len(part):,}" for name, part in there.items())
    return told if streams else f"{told} samples"


def _tell_restart(rank: Rank, trainer: Trainer) -> None:
    """Write to the log and the loggers that the run was restarted, and why."""
    place = f"resuming {_place(trainer)}" if trainer.progress.step else "starting from scratch"
    text = f"Restart {rank.attempt}: {place}\nCause: {_cause_of_restart(rank)}"
    print(text, flush=True)
    for each in trainer.parts.loggers.values():
        each.text("restart", text)
        each.metrics({"restart/attempt": float(rank.attempt)}, step=trainer.progress.step, epoch=trainer.last_epoch)


def _cause_of_restart(rank: Rank) -> str:
    file = rank.run_dir.failure_of(node=0, attempt=rank.attempt - 1, is_last=False)
    if not file.exists():
        return f"not known: there is no {file.name}"
    first = FailureReport.from_plain(json.loads(file.read_text())).first
    return f"rank {first.rank}: {first.cause}"


def _place(trainer: Trainer) -> str:
    return f"after step {trainer.progress.step:,}, in epoch {trainer.progress.epoch}"


def _named(context: Context) -> str:
    return ", ".join(dict.fromkeys(str(device) for device in context.devices))


def _at(step: int | None, metrics: Mapping[str, float]) -> dict[str, Any]:
    return {"step": step, "metrics": dict(metrics)}


def _report(rank: Rank, trainer: Trainer, *, test: dict[str, Any] | None, seconds: float) -> None:
    """Write the results to `run.json`, where the parent reads them for the closing summary.

    `steps` and `epochs` count what was done. `best` (the best validation), `last` (the last validation) and `test` have
    the step of their weights.
    """
    progress = trainer.progress
    best = None if trainer.checkpoints is None else trainer.checkpoints.best
    max_epochs = rank.config.trainer.max_epochs
    reached = "max_epochs" if max_epochs is not None and progress.epoch >= max_epochs else "max_steps"
    ended_by = trainer.ending.reason or f"trainer.{reached} reached"
    if trainer.ending.was_stopped:
        ended_by = f"stopped on request ({trainer.ending.stopped_by})"
    results = {
        "steps": progress.step,
        "epochs": progress.epoch,
        "seconds": seconds,
        "ended_by": ended_by,
        "score": None if best is None else best.metrics[str(rank.config.checkpoint.monitor)],
        "best": None if best is None else _at(best.step, best.metrics),
        "last": None if trainer.val_step is None else _at(trainer.val_step, trainer.val_metrics),
        "test": test,
        "slow_ranks": [each.to_plain() for each in trainer.timing.slow_ranks()],
    }
    rank.run_dir.update_run({"results": results})
