"""What every job does first on a rank: read the configuration, check it, build the strategy, make loaders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset

from framework.checkpoint.writer import check_plain
from framework.config.parse import parse
from framework.config.saved import load_config
from framework.config.schema import Config
from framework.config.targets import check_targets
from framework.data.batching import BatchPlan, plan_batches
from framework.data.loader import EvalLoader, LoaderOptions, MapLoader, dataset_size, worker_count
from framework.data.stream import StreamLoader, StreamPlan
from framework.distributed.collectives import SideChannel
from framework.distributed.context import Context, make_context
from framework.distributed.seed import set_deterministic
from framework.engine import build
from framework.engine.limits import apply_fast_dev_run, check_streams, first_samples, train_size, with_batch_sizes
from framework.errors import ConfigError
from framework.launch.base import launcher_class
from framework.launch.plan import MonitorLink, RankArguments
from framework.strategies.base import Strategy
from framework.system.allocator import tune_malloc
from framework.system.hardware import processes_on_cores, threads_per_process
from framework.system.late_dynamo import import_dynamo_late
from framework.system.rank_log import rank_log
from framework.system.run_dir import RunDir
from framework.training.length import apply_limit, steps_per_epoch
from framework.types import Collate, Datasets, DataShare


@dataclass(frozen=True)
class RankSetup:
    """What is known on a rank before the process group is created."""

    requested: Config
    config: Config  # with `trainer.fast_dev_run` applied
    context: Context
    run_dir: RunDir
    plan: BatchPlan
    strategy: Strategy
    link: MonitorLink
    attempt: int  # restarts so far; a restart resumes from the run's own last checkpoint

    @property
    def data_share(self) -> DataShare:
        """The samples this rank trains on and validates."""
        return self.strategy.data_share(self.context)

    @property
    def seeded_as(self) -> int:
        """The number that seeds this rank's generators, with the run's seed.

        Ranks that train on the same samples draw the same numbers, as for dropout, unless they have different stages.
        """
        return self.context.rank if self.strategy.num_stages is not None else self.data_share.rank

    @cached_property
    def exchange(self) -> SideChannel:
        """For ranks that read streams. If there are any, every rank must open it, inside the process group."""
        backend = self.config.backend
        return SideChannel(self.context, timeout_s=max(backend.init_timeout, backend.timeout))


@contextmanager
def setup_rank(arguments: RankArguments, link: MonitorLink) -> Iterator[RankSetup]:
    """Open the rank's log, set up the process and check the configuration; there is no process group yet.

    Raises FrameworkError for a wrong request.
    """
    run_dir = RunDir(Path(arguments.run_dir))
    requested = parse(load_config(run_dir))
    config = apply_fast_dev_run(requested)
    context = make_context(
        arguments.topology,
        node_rank=arguments.node_rank,
        local_rank=arguments.local_rank,
        backend_name=config.backend.name,
    )
    import_dynamo_late()
    with rank_log(run_dir.rank_log(context.rank), place=context.description):
        if context.device.type == "cpu":
            tune_malloc()
        else:
            # Before the user's code is imported or built: it would open a context on GPU 0 in every rank.
            torch.accelerator.set_device_index(context.device)
        if config.trainer.matmul_precision is not None:
            torch.set_float32_matmul_precision(config.trainer.matmul_precision)
        if config.trainer.num_threads is not None:
            torch.set_num_threads(config.trainer.num_threads)
        elif "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(threads_per_process(procs_on_cores(config, context)))
        set_deterministic(config.trainer.deterministic, benchmark=config.trainer.benchmark)
        strategy, plan = plan_training(config, context)
        yield RankSetup(requested, config, context, run_dir, plan, strategy, link=link, attempt=arguments.attempt)


def plan_training(config: Config, context: Context) -> tuple[Strategy, BatchPlan]:
    """Check every `_target_`, and return the strategy and what one optimizer step takes.

    Raises FrameworkError for a wrong request.
    """
    check_targets(config)
    strategy = build.build_strategy(config.strategy, context=context)
    build.check_callbacks_fit(config.callbacks, strategy)
    strategy.check_precision(config.trainer.precision)
    return strategy, plan_steps(config, context, strategy)


def plan_steps(config: Config, context: Context, strategy: Strategy) -> BatchPlan:
    """Return what one optimizer step takes. Raises ConfigError for a batch that can't be split."""
    data, share, batch_size = config.data, strategy.data_share(context), config.data.train_batch_size
    if data.global_batch_size is None and batch_size < share.micro_batches:
        raise ConfigError(
            f"data.batch_size={batch_size} can't be cut into strategy.num_microbatches={share.micro_batches}, of "
            f"one sample each at least.\nUse data.batch_size={share.micro_batches} or more, or fewer micro-batches."
        )
    return plan_batches(
        batch_size=batch_size,
        global_batch_size=data.global_batch_size,
        world_size=share.world_size,
        accumulate=config.trainer.accumulate_grad_batches,
        cuts=share.micro_batches,
        drop_last=bool(data.drop_last),
    )


def build_data(setup: RankSetup) -> tuple[Datasets, RankSetup]:
    """Return the datasets, checked, and the set-up with their batch sizes, if the configuration leaves these open."""
    datasets = build.build_data(setup.config, setup.context)
    check_streams(setup.config, datasets, setup.strategy)
    config = with_batch_sizes(setup.config, datasets)
    if config is not setup.config:
        setup = replace(setup, config=config, plan=plan_steps(config, setup.context, setup.strategy))
    return datasets, setup


def make_train_loader(setup: RankSetup, datasets: Datasets) -> MapLoader | StreamLoader:
    """Return the loader of the train part."""
    config, dataset, collate_fn = setup.config, datasets.train, datasets.collate_fn_of("train")
    if not isinstance(dataset, IterableDataset):
        size = train_size(datasets, processes=setup.plan.world_size)
        return MapLoader(
            dataset,
            split="train",
            plan=setup.plan,
            rank=setup.data_share.rank,
            device=setup.context.device,
            options=replace(loader_options(setup), collate_fn=collate_fn),
            seed=config.seed,
            shuffle=config.data.shuffle and config.trainer.overfit_batches is None,
            sampler=datasets.sampler,
            limit=steps_per_epoch(config.trainer, setup.plan, size=size),
        )
    steps = steps_per_epoch(config.trainer, setup.plan, size=None)
    limit = None if steps is None else steps * setup.plan.global_batch_size
    check_state = partial(check_plain, name="the train stream's state_dict()")
    return StreamLoader(
        dataset,
        plan=StreamPlan(
            "train",
            setup.plan,
            setup.data_share.rank,
            is_sharded=config.data.stream != "shared",
            seed=config.seed,
            limit=limit,
            in_worker=_stream_in_worker(setup),
            collate_fn=collate_fn,
        ),
        device=setup.context.device,
        exchange=setup.exchange,
        stops_first=config.data.stream == "stop",
        check_state=check_state if config.checkpoint.enabled else None,
    )


def make_eval_loaders(
    setup: RankSetup, datasets: Datasets, *, part: str, strategy: Strategy | None = None
) -> dict[str, EvalLoader]:
    """Return the loader of each set of an evaluation part, cut to `limit_PART_batches`, by the prefix of its metrics.

    strategy: the one that wraps the model to evaluate; None if each rank has all of it.
    """
    limit: int | float | None = getattr(setup.config.trainer, f"limit_{part}_batches")
    sets = {"train": datasets.train} if part == "train" else datasets.sets(part)
    return {
        name: _eval_loader(
            setup, dataset, name, limit=limit, collate_fn=datasets.collate_fn_of(name), strategy=strategy
        )
        for name, dataset in (sets if limit != 0 else {}).items()
    }


def _eval_loader(
    setup: RankSetup,
    dataset: Any,
    name: str,
    *,
    limit: int | float | None,
    collate_fn: Collate | None,
    strategy: Strategy | None,
) -> EvalLoader:
    context, data = setup.context, setup.config.data
    batch_size = data.evaluated_batch_size
    share = DataShare(context.rank, context.world_size) if strategy is None else setup.data_share
    plan = plan_batches(batch_size=batch_size, global_batch_size=None, world_size=share.world_size, accumulate=1)
    is_sharded = isinstance(dataset, IterableDataset) and data.stream != "shared"
    loader: MapLoader | StreamLoader
    if isinstance(dataset, IterableDataset):
        loader = StreamLoader(
            dataset,
            plan=StreamPlan(
                name,
                batches=plan,
                rank=share.rank,
                is_sharded=is_sharded,
                seed=setup.config.seed,
                limit=None if limit is None else int(limit) * batch_size,
                in_worker=_stream_in_worker(setup),
                collate_fn=collate_fn,
            ),
            device=context.device,
            exchange=setup.exchange,
        )
    else:
        if limit is not None:
            # Counted in one process's batches, so that the same samples are evaluated on any number of processes.
            batches = apply_limit(-(-dataset_size(dataset, split=name) // batch_size), limit)
            dataset = first_samples(dataset, batches * batch_size)
        options = replace(loader_options(setup), collate_fn=collate_fn)
        loader = MapLoader(
            dataset,
            split=name,
            plan=plan,
            rank=share.rank,
            device=context.device,
            options=options,
            seed=setup.config.seed,
        )
    is_even = strategy is not None and strategy.forward_communicates
    turns = None if is_sharded else batch_size
    return EvalLoader(loader, turns=turns, is_even=is_even, tick=setup.link.rank_status.tick)


def _stream_in_worker(setup: RankSetup) -> bool:
    """Return True if a stream is read by a worker process: there is a core for it, or it was requested."""
    wanted = setup.config.data.num_workers
    if wanted is None:
        wanted = worker_count(procs=procs_on_cores(setup.config, setup.context))
    return wanted > 0


def loader_options(setup: RankSetup) -> LoaderOptions:
    """Return how the parts of the data are loaded on this rank."""
    data, topology = setup.config.data, setup.context.topology
    return LoaderOptions(
        data.loader,
        num_workers=data.num_workers,
        procs_on_node=topology.procs_per_node,
        procs_on_cores=procs_on_cores(setup.config, setup.context),
        procs_on_device=topology.procs_per_gpu,
        logs=setup.context.is_main,
    )


def procs_on_cores(config: Config, context: Context) -> int:
    """Return how many processes share this one's cores: all of the node, unless srun has bound each to its own."""
    procs = context.topology.procs_per_node
    # The cores of one that srun has started may be its own; those of our own ranks are the command's.
    if not launcher_class(config.launcher).joins_started_ranks:
        return procs
    return processes_on_cores(local_rank=context.local_rank, procs=procs, environ=os.environ)
