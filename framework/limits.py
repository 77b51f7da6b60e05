"""The settings that shorten a run, turned into numbers: `limit_*_batches`, `overfit_batches`, `fast_dev_run`."""

from __future__ import annotations

import math
from dataclasses import replace

from torch.utils.data import IterableDataset, Subset

from framework.config.schema import Config, TrainerConfig
from framework.data.batching import BatchPlan, count_windows
from framework.launch.stopping import STEPS_TO_COME
from framework.types import Datasets, MapDataset, Strategy, steps_to_exchange


def shortened(config: Config) -> Config:
    """Return the config with `fast_dev_run=n` spelled out: n batches of each part, no checkpoints, loggers, callbacks.

    The learning-rate schedule isn't shortened: these are the first steps of the requested run.
    """
    batches = int(config.trainer.fast_dev_run)
    if batches == 0:
        return config
    trainer = replace(
        config.trainer,
        max_epochs=1,
        max_steps=None,
        limit_train_batches=batches,
        limit_val_batches=batches,
        limit_test_batches=batches,
        log_every_n_steps=1,
        val_check_interval=None,
        check_val_every_n_epoch=1,
        num_sanity_val_steps=0,
    )
    return replace(
        config, trainer=trainer, checkpoint=replace(config.checkpoint, enabled=False), logger={}, callbacks={}
    )


def steps_per_epoch(settings: TrainerConfig, plan: BatchPlan, *, size: int | None) -> int | None:
    """Return the optimizer steps of an epoch of `size` samples; None if that isn't known.

    A stream (`size` is None) has at most as many as `limit_train_batches` allows.
    """
    if size is not None:
        steps = count_windows(size, global_batch_size=plan.global_batch_size)
        limit = train_windows(settings, plan, size=size)
        return steps if limit is None else min(steps, limit)
    if settings.limit_train_batches is None:
        return None
    return math.ceil(int(settings.limit_train_batches) / settings.accumulate_grad_batches)


def total_steps(settings: TrainerConfig, *, steps_per_epoch: int | None) -> int | None:
    """Optimizer steps of the whole run, or None where only a callback will end it.

    If the steps of an epoch are unknown, it is `max_steps`, or None.
    """
    epochs = settings.max_epochs
    by_epochs = None if epochs is None or steps_per_epoch is None else epochs * steps_per_epoch
    known = [limit for limit in (settings.max_steps, by_epochs) if limit is not None]
    return min(known, default=None)


def steps_to_meeting(strategy: Strategy, settings: TrainerConfig, *, step: int) -> int:
    """In how many more steps than `step`, which are done, every rank will have waited for every other since now."""
    to_exchange = steps_to_exchange(strategy)
    if to_exchange is None:
        return STEPS_TO_COME
    return min(to_exchange, settings.log_every_n_steps - step % settings.log_every_n_steps)


def limited(total: int, limit: int | float | None) -> int:
    """How many of `total` batches a limit leaves: an int counts them, a float is a share of them."""
    if limit is None:
        return total
    if isinstance(limit, float):
        return max(1, int(total * limit)) if limit > 0 and total else 0
    return min(total, limit)


def train_windows(settings: TrainerConfig, plan: BatchPlan, *, size: int) -> int | None:
    """Global batches an epoch is cut to, or None. The limit counts each process's batches, as PyTorch's loaders do.

    Into how many parts a pipeline cuts each of them doesn't matter.
    """
    if settings.limit_train_batches is None:
        return None
    accumulated = settings.accumulate_grad_batches
    batches = count_windows(size, global_batch_size=plan.global_batch_size) * accumulated
    return math.ceil(limited(batches, settings.limit_train_batches) / accumulated)


def overfitted(datasets: Datasets, settings: TrainerConfig, plan: BatchPlan) -> Datasets:
    """With `overfit_batches`, the same few global batches for training and validation, and no test."""
    if settings.overfit_batches is None:
        return datasets
    assert not isinstance(datasets.train, IterableDataset), "a stream can't be overfitted: see streams.py"
    size = len(datasets.train)
    windows = limited(count_windows(size, global_batch_size=plan.global_batch_size), settings.overfit_batches)
    few = first_samples(datasets.train, windows * plan.global_batch_size)
    return Datasets(train=few, val=few, test=None)


def first_samples(dataset: MapDataset, count: int) -> MapDataset:
    """The first `count` samples, or all where there are fewer."""
    if count >= len(dataset):
        return dataset
    return Subset(dataset, range(count))  # type: ignore[arg-type]
