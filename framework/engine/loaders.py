"""The datasets of a run, and the loaders of this rank's samples."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

from torch.utils.data import IterableDataset

from framework.checkpoint.writer import check_plain
from framework.config.schema import Config
from framework.data.batch_lists import BatchLists
from framework.data.batching import BatchPlan, plan_batches
from framework.data.epochs import apply_limit
from framework.data.loader import EvalLoader, LoaderOptions, MapLoader, TrainLoader, dataset_size, worker_count
from framework.data.source import SourceLoader
from framework.data.stream import StreamLoader
from framework.data.stream_plan import StreamPlan
from framework.engine.builders.data import build_data
from framework.engine.data_checks import check_lists, check_source, check_streams
from framework.engine.limits import first_samples
from framework.engine.setup import RankSetup, plan_steps, procs_on_cores
from framework.errors import ConfigError
from framework.strategies.base import Strategy
from framework.training.length import epoch_steps
from framework.types import Collate, Datasets, DataShare, MapDataset, Source


def prepare_data(setup: RankSetup) -> tuple[Datasets, RankSetup]:
    """Return the datasets, checked, and the set-up with their batch sizes, if the configuration leaves these open."""
    datasets = build_data(setup.config, setup.context)
    check_streams(setup.config, datasets, setup.strategy)
    check_source(setup.config, datasets, setup.strategy, setup.context)
    check_lists(setup.config, datasets, processes=setup.plan.world_size)
    config = with_batch_sizes(setup.config, datasets)
    if config is not setup.config:
        setup = replace(setup, config=config, plan=plan_steps(config, setup.context, setup.strategy))
    return datasets, setup


def with_batch_sizes(config: Config, datasets: Datasets) -> Config:
    """Return the configuration with the batch sizes and `drop_last` of DataLoaders in place of `auto` and `null`.

    The global batch size is the nominal one of a batch sampler, if that lists the batches.
    """
    data = config.data
    if isinstance(datasets.sampler, BatchLists):
        size = datasets.sampler.nominal_size * config.trainer.accumulate_grad_batches
        data = replace(data, global_batch_size=size)
    if data.batch_size == "auto" and datasets.batch_size is not None:
        data = replace(data, batch_size=datasets.batch_size)
    if data.eval_batch_size == "auto" and datasets.eval_batch_size is not None:
        data = replace(data, eval_batch_size=datasets.eval_batch_size)
    if data.drop_last is None and datasets.drop_last is not None:
        data = replace(data, drop_last=datasets.drop_last)
    if data is config.data:
        return config
    return replace(config, data=data)


# The train part


def make_train_loader(setup: RankSetup, datasets: Datasets) -> TrainLoader:
    """Return the loader of the train part."""
    dataset = datasets.train
    collate_fn = datasets.collate_fn_of("train")
    if isinstance(dataset, IterableDataset):
        return _train_stream_loader(setup, dataset, collate_fn)

    config = setup.config
    dataset_size(dataset, split="train", processes=setup.plan.world_size)
    if isinstance(dataset, Source):
        return SourceLoader(
            dataset,
            plan=setup.plan,
            rank=setup.data_share.rank,
            limit=config.trainer.limit_train_batches,
            accumulated=config.trainer.accumulate_grad_batches,
        )
    return MapLoader(
        dataset,
        split="train",
        plan=setup.plan,
        rank=setup.data_share.rank,
        device=setup.context.device,
        options=loader_options(setup, collate_fn),
        seed=config.seed,
        shuffle=config.data.shuffle and config.trainer.overfit_batches is None,
        sampler=datasets.sampler,
        limit=config.trainer.limit_train_batches,
        accumulated=config.trainer.accumulate_grad_batches,
    )


def _train_stream_loader(setup: RankSetup, dataset: IterableDataset[Any], collate_fn: Collate | None) -> StreamLoader:
    config = setup.config
    num_samples = None
    steps = epoch_steps(config.trainer, setup.plan, sizes=None)
    if steps is not None:
        num_samples = steps.samples_of(0)
    check_state = None
    if config.checkpoint.enabled:
        check_state = partial(check_plain, name="the train stream's state_dict()")
    return StreamLoader(
        dataset,
        plan=_stream_plan(
            setup,
            "train",
            batches=setup.plan,
            rank=setup.data_share.rank,
            limit=num_samples,
            collate_fn=collate_fn,
        ),
        device=setup.context.device,
        exchange=setup.exchange,
        stops_first=config.data.stream == "stop",
        check_state=check_state,
    )


# The parts to evaluate


def make_eval_loaders(
    setup: RankSetup, datasets: Datasets, *, part: str, strategy: Strategy | None = None
) -> dict[str, EvalLoader]:
    """Return the loaders of a part to evaluate, by the prefix of their metrics: a part may have several datasets.

    Args:
        part: `val`, `test`, or `train`. `trainer.limit_PART_batches` limits it.
        strategy: the one that wraps the model to evaluate; None if each rank has all of it.
    """
    limit: int | float | None = getattr(setup.config.trainer, f"limit_{part}_batches")
    if limit == 0:
        return {}
    named_datasets = {"train": datasets.train}
    if part != "train":
        named_datasets = datasets.sets(part)

    context = setup.context
    share = DataShare(context.rank, context.world_size)
    # If ranks communicate in the forward, all must run the same number of batches.
    is_even = False
    if strategy is not None:
        share = setup.data_share
        is_even = strategy.forward_communicates
    batch_size = setup.config.data.evaluated_batch_size
    plan = plan_batches(batch_size=batch_size, global_batch_size=None, world_size=share.world_size, accumulate=1)

    loaders = {}
    for name, dataset in named_datasets.items():
        if isinstance(dataset, Source):
            raise ConfigError(
                f"The train part is a {type(dataset).__name__}, a framework.Source, whose samples depend on the model: "
                "it can't be evaluated. Use the val or test part."
            )
        collate_fn = datasets.collate_fn_of(name)
        # Ranks take turns, one batch each, unless each reads a shard of its own of a stream.
        turns: int | None = batch_size
        loader: MapLoader | StreamLoader
        if isinstance(dataset, IterableDataset):
            num_samples = None if limit is None else int(limit) * batch_size
            stream_plan = _stream_plan(
                setup, name, batches=plan, rank=share.rank, limit=num_samples, collate_fn=collate_fn
            )
            # In the order of the stream.
            stream_plan = replace(stream_plan, num_workers=min(1, stream_plan.num_workers))
            if stream_plan.is_sharded:
                turns = None
            loader = StreamLoader(dataset, plan=stream_plan, device=context.device, exchange=setup.exchange)
        else:
            loader = MapLoader(
                _limited(dataset, name, limit, batch_size),
                split=name,
                plan=plan,
                rank=share.rank,
                device=context.device,
                options=loader_options(setup, collate_fn),
                seed=setup.config.seed,
            )
        loaders[name] = EvalLoader(loader, turns=turns, is_even=is_even, tick=setup.link.rank_status.tick)
    return loaders


def _limited(dataset: MapDataset, name: str, limit: int | float | None, batch_size: int) -> MapDataset:
    """Return the samples to evaluate: `limit` counts batches of one process, so their number doesn't change it."""
    if limit is None:
        return dataset
    num_batches = math.ceil(dataset_size(dataset, split=name) / batch_size)
    return first_samples(dataset, apply_limit(num_batches, limit) * batch_size)


# How samples are loaded


def loader_options(setup: RankSetup, collate_fn: Collate | None) -> LoaderOptions:
    """Return how the parts of the data are loaded on this rank."""
    data = setup.config.data
    topology = setup.context.topology
    return LoaderOptions(
        data.loader,
        num_workers=data.num_workers,
        procs_on_node=topology.procs_per_node,
        procs_on_cores=procs_on_cores(setup.config, setup.context),
        procs_on_device=topology.procs_per_gpu,
        logs=setup.context.is_main,
        collate_fn=collate_fn,
    )


def _stream_plan(
    setup: RankSetup, name: str, *, batches: BatchPlan, rank: int, limit: int | None, collate_fn: Collate | None
) -> StreamPlan:
    """Return how a rank reads a stream. name: of the part. limit: samples at most, of all ranks; None for all."""
    data = setup.config.data
    num_workers = data.num_workers
    if num_workers is None:
        # One process reads ahead if there is a core for it. More would read other shards, which changes the numbers.
        num_workers = min(1, worker_count(procs=procs_on_cores(setup.config, setup.context)))
    return StreamPlan(
        name,
        batches=batches,
        rank=rank,
        is_sharded=data.stream != "shared",
        seed=setup.config.seed,
        limit=limit,
        num_workers=num_workers,
        collate_fn=collate_fn,
    )
