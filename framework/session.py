"""What every job's rank begins with: who am I, what is asked for, and can it be done at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from torch.utils.data import IterableDataset

from framework import build
from framework.allocator import keep_freed_memory
from framework.checkpoint import find, load, load_weights, read_manifest
from framework.checkpoint.store import check_shards
from framework.config.parse import parse
from framework.config.schema import Config, StreamSharing
from framework.data.batching import BatchPlan, plan_batches
from framework.data.choosing import Loading, worker_count
from framework.data.loader import EvalLoader, dataset_size
from framework.data.stream import Deal, Reading
from framework.data.stream_loader import StreamEvalLoader, StreamLoader, evaluation_plan
from framework.distributed.collectives import gather_to_all
from framework.distributed.context import Context, make_context
from framework.distributed.exchange import SideExchange
from framework.distributed.tensors import is_model_spread
from framework.errors import CheckpointError, ConfigError
from framework.hardware import Sharers, sharers_of_cores, threads_per_process
from framework.late_dynamo import late_dynamo
from framework.launch.link import Link
from framework.launch.plan import RankArguments
from framework.limits import first_samples, limited, shortened
from framework.rank_log import logger, rank_log
from framework.run_dir import RunDir
from framework.seed import set_deterministic
from framework.streams import check_state, is_sharded, streams_of, train_limit
from framework.types import Datasets, DataShare, MapDataset, Strategy, data_share, forward_communicates


@dataclass(frozen=True)
class Rank:
    """What every stage of a rank's work needs; all of it is known before the process group is created.

    Attributes:
        requested: the configuration as it was requested; `config` is what `trainer.fast_dev_run` leaves of it.
        attempt: how often the run was restarted after a failure; then it resumes from its own last checkpoint.
    """

    requested: Config
    config: Config
    context: Context
    run_dir: RunDir
    plan: BatchPlan
    strategy: Strategy
    link: Link
    attempt: int

    @property
    def data_share(self) -> DataShare:
        """Which samples this rank trains on and validates."""
        return data_share(self.strategy, rank=self.context.rank, world_size=self.context.world_size)

    @cached_property
    def exchange(self) -> SideExchange:
        """Of what ranks read of streams; see `open_for_streams`."""
        backend = self.config.backend
        return SideExchange(self.context, timeout_s=max(backend.init_timeout, backend.timeout))


@contextmanager
def entered(arguments: RankArguments, link: Link) -> Iterator[Rank]:
    """This rank with its log open, settings of the process made and every `_target_` checked; no process group yet.

    Raises FrameworkError for what can't be done as asked.
    """
    run_dir = RunDir(Path(arguments.run_dir))
    requested = parse(yaml.safe_load(run_dir.config_file.read_text()))
    config = shortened(requested)
    context = make_context(
        arguments.topology,
        node_rank=arguments.node_rank,
        local_rank=arguments.local_rank,
        backend_name=config.backend.name,
    )
    with rank_log(run_dir, context), late_dynamo():
        _prepare_process(config, context)
        build.check_targets(config)
        strategy = build.build_strategy(config.strategy, context=context)
        build.check_callbacks_fit(config.callbacks, strategy)
        build.check_precision_fits(config.trainer.precision, strategy)
        plan = batch_plan(config, data_share(strategy, rank=context.rank, world_size=context.world_size))
        yield Rank(requested, config, context, run_dir, plan, strategy, link=link, attempt=arguments.attempt)


def open_for_streams(rank: Rank, datasets: Datasets) -> None:
    """Make the group that streams need, where there are any. Every rank must call it, inside the process group."""
    if streams_of(datasets):
        rank.exchange.open()


def stream_loader(rank: Rank, dataset: IterableDataset[Any]) -> StreamLoader:
    """The loader of a train part that is a stream."""
    config, share = rank.config, rank.data_share
    return StreamLoader(
        dataset,
        deal=Deal(rank.plan, share.rank, is_sharded(config.data)),
        reading=_reading(rank, part="train", seed=config.seed, limit=train_limit(config.trainer, rank.plan)),
        device=rank.context.device,
        exchange=rank.exchange,
        stops_first=config.data.stream is StreamSharing.STOP,
        check_state=check_state if config.checkpoint.enabled else None,
    )


def eval_loader(
    rank: Rank,
    dataset: MapDataset | IterableDataset[Any] | None,
    *,
    part: str,
    limit: int | float | None,
    strategy: Strategy | None = None,
) -> EvalLoader | StreamEvalLoader | None:
    """The loader of an evaluation part cut to its limit; None where there is nothing to evaluate.

    strategy: by which the model to evaluate is wrapped; None where each rank has all of it.
    """
    if dataset is None:
        return None
    context, data = rank.context, rank.config.data
    batch_size = data.eval_batch_size or data.batch_size
    share = DataShare(context.rank, context.world_size) if strategy is None else rank.data_share
    is_even = strategy is not None and forward_communicates(strategy)
    if isinstance(dataset, IterableDataset):
        if limit == 0:
            return None
        return StreamEvalLoader(
            dataset,
            deal=Deal(evaluation_plan(batch_size, world_size=share.world_size), share.rank, is_sharded(data)),
            reading=_reading(rank, part=part, seed=0, limit=None if limit is None else int(limit) * batch_size),
            device=context.device,
            exchange=rank.exchange,
            is_even=is_even,
        )
    if limit is not None:
        # Counted in one process's batches, so that the same samples are evaluated on any number of processes.
        batches = limited(-(-dataset_size(dataset, part=part) // batch_size), limit)
        if batches == 0:
            return None
        dataset = first_samples(dataset, batches * batch_size)
    return EvalLoader(
        dataset,
        part=part,
        batch_size=batch_size,
        rank=share.rank,
        world_size=share.world_size,
        device=context.device,
        loading=loading(rank),
        is_even=is_even,
    )


def _reading(rank: Rank, *, part: str, seed: int, limit: int | None) -> Reading:
    """How a stream is read: by a process of its own where there is a core for it, or it is asked for; which is told."""
    data = rank.config.data
    wanted = data.num_workers
    if wanted is None:
        wanted = worker_count(procs=core_sharers(rank.config, rank.context).number)
    if rank.context.is_main:
        who = "a worker process" if wanted else "this process"
        logger.info("data: the %s part is a stream, read by %s (data.stream=%s)", part, who, data.stream.value)
    return Reading(part, seed=seed, limit=limit, in_worker=wanted > 0)


def loading(rank: Rank) -> Loading:
    """How the parts of the data are to be loaded on this rank."""
    data, topology = rank.config.data, rank.context.topology
    users = topology.procs_per_node * topology.span
    return Loading(
        data.loader,
        num_workers=data.num_workers,
        procs=topology.procs_per_node,
        core_sharers=core_sharers(rank.config, rank.context).number,
        sharing=-(-users // topology.gpus_per_node) if topology.shares_gpus else 1,
        tells=rank.context.is_main,
    )


def core_sharers(config: Config, context: Context) -> Sharers:
    """Who has this process's cores: all of its node, but where srun started each and bound it to cores of its own."""
    procs, own = context.topology.procs_per_node, context.local_rank
    if config.launcher.name not in ("auto", "adopted"):  # whoever was started by a task has that task's cores
        return Sharers(procs, own)
    return sharers_of_cores(local_rank=own, procs=procs, environ=os.environ)


def load_model(rank: Rank, model: nn.Module, path: Path) -> Path:
    """The weights of a checkpoint into the bare model, and nothing else of it; gives the checkpoint's directory.

    Every rank must call it. Raises CheckpointError where it is missing, damaged or of another model.
    """
    source = find(path)
    if not is_model_spread(model):
        load_weights(model, load(source, map_location=rank.context.device, parts=["model"])["model"], source=source)
        return source
    from framework.checkpoint.resharding import load_spread_model  # takes most of a second to import

    check_all_shards(source, rank.context)
    load_spread_model(source, model)
    return source


def check_all_shards(directory: Path, context: Context) -> None:
    """Raise CheckpointError on every rank where a shard isn't as it was written: each rank reads some of them.

    Every rank must call it.
    """
    manifest = read_manifest(directory)
    fault: str | None = None
    try:
        check_shards(directory, manifest, number=context.rank, of=context.world_size)
    except CheckpointError as error:
        fault = str(error)
    found = next((each for each in gather_to_all(fault, context) if each is not None), None)
    if found is not None:
        raise CheckpointError(found)


def _prepare_process(config: Config, context: Context) -> None:
    """Process-wide settings, made once, before anything computes."""
    if context.device.type == "cpu":
        keep_freed_memory()
    if config.trainer.num_threads is not None:
        torch.set_num_threads(config.trainer.num_threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads_per_process(core_sharers(config, context).number))
    set_deterministic(config.trainer.deterministic, benchmark=config.trainer.benchmark)


def batch_plan(config: Config, share: DataShare) -> BatchPlan:
    """What one optimizer step takes. Raises ConfigError where there isn't a sample for every pass."""
    data, accumulate = config.data, config.trainer.accumulate_grad_batches
    if data.global_batch_size is None and data.batch_size < share.micro_batches:
        raise ConfigError(
            f"data.batch_size={data.batch_size} can't be cut into strategy.num_microbatches={share.micro_batches}, of "
            f"one sample each at least.\nUse data.batch_size={share.micro_batches} or more, or fewer micro-batches."
        )
    return plan_batches(
        batch_size=data.batch_size,
        global_batch_size=data.global_batch_size,
        world_size=share.world_size,
        accumulate=accumulate,
        cuts=share.micro_batches,
    )
