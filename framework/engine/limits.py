"""What the settings mean for the datasets: limits, the number of steps, and mistakes that show once these are built."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch.utils.data import IterableDataset, Subset

from framework.config.parse import raise_mistakes
from framework.config.schema import Config, TrainerConfig
from framework.config.suggest import did_you_mean, nearest
from framework.data.batching import BatchPlan, count_windows
from framework.data.loader import dataset_size
from framework.errors import ConfigError
from framework.strategies.base import Strategy
from framework.training.length import FROM_SCRATCH, Start, apply_limit, step_of_epoch_end, total_steps
from framework.types import Datasets, MapDataset


def apply_fast_dev_run(config: Config) -> Config:
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


def apply_overfit_batches(datasets: Datasets, settings: TrainerConfig, plan: BatchPlan) -> Datasets:
    """With `overfit_batches`, return the same few global batches for training and validation, and no test."""
    if settings.overfit_batches is None:
        return datasets
    assert not isinstance(datasets.train, IterableDataset), "check_streams refuses this"
    size = len(datasets.train)
    number = count_windows(size, global_batch_size=plan.global_batch_size, drop_last=plan.drop_last)
    windows = apply_limit(number, settings.overfit_batches)
    few, collate_fn = first_samples(datasets.train, windows * plan.global_batch_size), datasets.collate_fn_of("train")
    return Datasets(train=few, val=few, test=None, collate_fn=collate_fn)


def with_batch_sizes(config: Config, datasets: Datasets) -> Config:
    """Return the configuration with the batch sizes and `drop_last` of DataLoaders in place of `auto` and `null`."""
    data = config.data
    if data.batch_size == "auto" and datasets.batch_size is not None:
        data = replace(data, batch_size=datasets.batch_size)
    if data.eval_batch_size == "auto" and datasets.eval_batch_size is not None:
        data = replace(data, eval_batch_size=datasets.eval_batch_size)
    if data.drop_last is None and datasets.drop_last is not None:
        data = replace(data, drop_last=datasets.drop_last)
    return config if data is config.data else replace(config, data=data)


def train_size(datasets: Datasets, *, processes: int = 1) -> int:
    """Return the samples of an epoch. Raises DataError if there are none, or fewer than `processes`."""
    size = dataset_size(datasets.train, split="train", processes=processes)
    return size if datasets.sampler is None else len(datasets.sampler)


def first_samples(dataset: MapDataset, count: int) -> MapDataset:
    """Return the first `count` samples, or all if there are fewer."""
    if count >= len(dataset):
        return dataset
    return Subset(dataset, range(count))  # type: ignore[arg-type]


# Rules between the settings and the datasets, known once these are built


def streams_of(datasets: Datasets) -> list[str]:
    """Return the parts that are streams."""
    return [part for part, each in datasets.parts.items() if isinstance(each, IterableDataset)]


def check_streams(config: Config, datasets: Datasets, strategy: Strategy) -> None:
    """Raise ConfigError, with all mistakes, for keys that can't go with a stream, or that need one."""
    data, trainer, streams = config.data, config.trainer, streams_of(datasets)
    trains, sharding = "train" in streams, f"data.stream={data.stream}"
    splits = trains and data.stream != "shared"
    keys = [f"limit_{part.partition('/')[0]}_batches" for part in streams]
    limits = {f"trainer.{key}": getattr(trainer, key) for key in keys}
    mistakes = [
        f"{key}={limit} is a share of a stream, whose length is unknown. Use a whole number of batches."
        for key, limit in limits.items()
        if isinstance(limit, float)
    ]
    if streams and trainer.overfit_batches is not None:
        mistakes.append(
            f"trainer.overfit_batches can't go with a stream ({', '.join(streams)}), which gives each sample once. "
            "Use trainer.limit_train_batches, or map-style datasets."
        )
    if trains and data.shuffle:
        mistakes.append(
            "data.shuffle=true can't go with a stream to train on, which has its own order. Set data.shuffle=false, "
            "and shuffle in the dataset (its set_epoch(epoch) is called)."
        )
    if trains and data.loader == "resident":
        mistakes.append("data.loader=resident can't go with a stream to train on, of unknown length. Use auto.")
    if trains and (data.num_workers or 0) > 1:
        mistakes.append(
            f"data.num_workers={data.num_workers} can't go with a stream to train on: several processes would read the "
            "same samples. Use data.num_workers=1, which has one read ahead, 0, or auto."
        )
    if splits and (strategy.mixes_samples or strategy.num_stages is not None):
        key = "strategy.sync_batchnorm=true" if strategy.mixes_samples else "strategy=pipeline"
        mistakes.append(
            f"{sharding} can't go with {key}: the stand-in for a process whose stream has ended would count. "
            "Use data.stream=shared, or leave that out."
        )
    if splits and config.job == "parity":
        mistakes.append(
            f"{sharding} can't go with job=parity, which compares numbers of processes: each would cut the stream "
            "differently. Use data.stream=shared."
        )
    raise_mistakes(mistakes)


def check_validation(
    config: Config, datasets: Datasets, *, steps_per_epoch: int | None, start: Start = FROM_SCRATCH
) -> str | None:
    """Return a warning if training ends before the first validation is due."""
    settings = config.trainer
    steps = total_steps(settings, steps_per_epoch=steps_per_epoch, start=start)
    interval, every = settings.val_check_interval, settings.check_val_every_n_epoch
    first = None
    if interval is not None:
        first = (start.step // interval + 1) * interval
    # A stream's epochs may be shorter.
    elif every is not None and steps_per_epoch is not None and not isinstance(datasets.train, IterableDataset):
        epoch = (start.epoch // every + 1) * every - 1
        first = step_of_epoch_end(epoch, steps_per_epoch=steps_per_epoch, start=start)
    if steps is not None and steps <= start.step:
        return None
    if datasets.val is None or settings.limit_val_batches == 0 or steps is None or first is None or first <= steps:
        return None
    return (
        f"Nothing will be validated: training ends after {steps} steps, and the first validation is due after "
        f"{first}. Use trainer.val_check_interval={steps} to validate at the end."
    )


def check_metrics(config: Config, metrics: Collection[str]) -> None:
    """Raise ConfigError if a monitored metric isn't one of those that validation computes: none without that part."""
    for key, metric in _monitored(config).items():
        if metric in metrics:
            continue
        remedy = f"Use one of {', '.join(metrics)}." if metrics else "data.datasets has no validation part: add one."
        raise ConfigError(f"{key}={metric} is never computed. {remedy}{did_you_mean(nearest(metric, metrics))}")


def _monitored(config: Config) -> dict[str, str]:
    """Return the metrics that are monitored, by config key."""
    watched = {"scheduler.monitor": config.scheduler.monitor}
    if config.checkpoint.enabled:
        watched["checkpoint.monitor"] = config.checkpoint.monitor
    watched |= {f"callbacks.{name}.monitor": node.get("monitor") for name, node in config.callbacks.items()}
    return {key: metric for key, metric in watched.items() if metric is not None}
