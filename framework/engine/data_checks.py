"""Mistakes that show once the datasets are built: keys that can't go with a stream, and metrics nobody computes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from torch.utils.data import IterableDataset

from framework.callbacks import EarlyStopping
from framework.checkpoint.manager import CheckpointManager
from framework.config.mistakes import raise_mistakes
from framework.config.schema import Config
from framework.config.suggest import did_you_mean, nearest
from framework.data.batch_lists import BatchLists
from framework.data.epochs import EpochSteps
from framework.distributed.context import Context
from framework.errors import ConfigError
from framework.strategies.base import Strategy
from framework.system.formatting import format_count
from framework.training.length import FROM_SCRATCH, Start, step_of_epoch_end, total_steps
from framework.types import Callback, Datasets, Source


def streams_of(datasets: Datasets) -> list[str]:
    """Return the parts that are streams."""
    return [part for part, dataset in datasets.parts.items() if isinstance(dataset, IterableDataset)]


def check_streams(config: Config, datasets: Datasets, strategy: Strategy) -> None:
    """Raise ConfigError, with all mistakes, for keys that can't go with a stream, or that need one."""
    streams = streams_of(datasets)
    mistakes = list(_mistakes_of_streams(config, streams))
    if "train" in streams:
        mistakes += _mistakes_of_a_train_stream(config, strategy)
    raise_mistakes(mistakes)


def _mistakes_of_streams(config: Config, streams: list[str]) -> Iterator[str]:
    for part in streams:
        key = f"limit_{part.partition('/')[0]}_batches"
        limit = getattr(config.trainer, key)
        if isinstance(limit, float):
            yield (
                f"trainer.{key}={limit} is a share of a stream, whose length is unknown. Use a whole number of batches."
            )
    interval = config.trainer.val_check_interval
    if "train" in streams and isinstance(interval, float):
        yield (
            f"trainer.val_check_interval={interval} is a share of an epoch, and a stream's length is unknown. Use a "
            "number of optimizer steps, or null for the end of epochs."
        )
    if streams and config.trainer.overfit_batches is not None:
        yield (
            f"trainer.overfit_batches can't go with a stream ({', '.join(streams)}), which gives each sample once. "
            "Use trainer.limit_train_batches, or map-style datasets."
        )


def _mistakes_of_a_train_stream(config: Config, strategy: Strategy) -> Iterator[str]:
    data = config.data
    if data.shuffle:
        yield (
            "data.shuffle=true can't go with a stream to train on, which has its own order. Set data.shuffle=false, "
            "and shuffle in the dataset (its set_epoch(epoch) is called)."
        )
    if data.loader == "resident":
        yield "data.loader=resident can't go with a stream to train on, of unknown length. Use auto."

    if data.defer_steps:
        yield (
            "data.defer_steps can't go with a stream to train on, whose samples come once. Use data.skip_steps, which "
            "leaves them out."
        )

    # The rest is about a stream of which each process reads its own part.
    if data.stream == "shared":
        return
    key = f"data.stream={data.stream}"
    mixing = None
    if strategy.mixes_samples:
        mixing = "strategy.sync_batchnorm=true"
    elif strategy.num_stages is not None:
        mixing = "strategy=pipeline"
    if mixing is not None:
        yield (
            f"{key} can't go with {mixing}: the stand-in for a process whose stream has ended would count. "
            "Use data.stream=shared, or leave that out."
        )
    if config.job == "parity":
        yield (
            f"{key} can't go with job=parity, which compares numbers of processes: each would cut the stream "
            "differently. Use data.stream=shared."
        )


def check_source(config: Config, datasets: Datasets, strategy: Strategy, context: Context) -> None:
    """Raise ConfigError, with all mistakes, for what can't go with a train part whose samples depend on the model."""
    for part, dataset in datasets.parts.items():
        if part != "train" and isinstance(dataset, Source):
            raise ConfigError(f"The {part} part is a framework.Source, which is a part to train on. Use a dataset.")
    if not isinstance(datasets.train, Source):
        return
    name = type(datasets.train).__name__
    mistakes = []
    has_own_samples = strategy.data_share(context).world_size == context.world_size
    if strategy.forward_communicates or strategy.replicas_differ or not has_own_samples:
        mistakes.append(
            f"{name} is a framework.Source: each process calls the model by itself, as often as it needs, and all have "
            f"the same weights. {type(strategy).__name__} doesn't allow that. Use strategy=ddp, allreduce or butterfly."
        )
    keys = {
        "data.sampler": datasets.sampler,
        "data.collate_fn for the train part": datasets.collate_fn_of("train"),
        "trainer.overfit_batches": config.trainer.overfit_batches,
    }
    for key, value in keys.items():
        if value is not None:
            mistakes.append(f"{key} can't go with {name}, a framework.Source, which makes its batches. Leave it out.")
    if config.job == "tune":
        mistakes.append(f"job=tune repeats batches, which {name}, a framework.Source, can't: they depend on the model.")
    raise_mistakes(mistakes)


def check_lists(config: Config, datasets: Datasets, *, processes: int) -> None:
    """Raise ConfigError, with all mistakes, for what can't go with batches that a batch sampler lists.

    processes: that share the batches. Raises DataError if they can't.
    """
    lists = datasets.sampler
    if not isinstance(lists, BatchLists):
        return
    lists.split_over(processes)
    what = f"{lists.name}, whose batches are split over the processes as they are"
    mistakes = []
    data = config.data
    if data.batch_size != "auto":
        mistakes.append(f"data.batch_size={data.batch_size} can't go with {what}. Leave it out.")
    if data.global_batch_size is not None:
        mistakes.append(f"data.global_batch_size={data.global_batch_size} can't go with {what}. Leave it out.")
    if config.trainer.overfit_batches is not None:
        mistakes.append(f"trainer.overfit_batches can't go with {what}. Use trainer.limit_train_batches.")
    if config.job == "tune":
        mistakes.append(f"job=tune changes the size of batches, which can't go with {what}.")
    raise_mistakes(mistakes)


def check_validation(
    config: Config, datasets: Datasets, *, steps: EpochSteps | None, start: Start = FROM_SCRATCH
) -> str | None:
    """Return a warning if training ends before the first validation is due. steps: of each epoch, None if unknown."""
    total = total_steps(config.trainer, steps=steps, start=start)
    if total is None or total <= start.step:
        return None
    if datasets.val is None or config.trainer.limit_val_batches == 0:
        return None
    first = _first_validation(config, datasets, steps=steps, start=start)
    if first is None or first <= total:
        return None
    end = format_count(total, "step")
    return (
        f"Nothing will be validated: training ends after {end}, and the first validation is due after "
        f"{first}. Use trainer.val_check_interval={total} to validate at the end."
    )


def _first_validation(config: Config, datasets: Datasets, *, steps: EpochSteps | None, start: Start) -> int | None:
    """Return after how many steps the first validation is due; None if that is unknown, or none is."""
    interval = config.trainer.val_check_interval
    if isinstance(interval, int):
        return (start.step // interval + 1) * interval
    every_n_epoch = config.trainer.check_val_every_n_epoch
    # A stream's epochs may be shorter.
    if every_n_epoch is None or steps is None or isinstance(datasets.train, IterableDataset):
        return None
    epoch = (start.epoch // every_n_epoch + 1) * every_n_epoch - 1
    end = step_of_epoch_end(epoch, steps=steps, start=start)
    if interval is None:
        return end
    begin = end - steps.of(epoch)
    every = steps.share(epoch, interval)
    number = max(0, start.step - begin) // every + 1
    if begin + number * every <= end:
        return begin + number * every
    # What is left of this epoch is shorter.
    begin = step_of_epoch_end(epoch + every_n_epoch - 1, steps=steps, start=start)
    return begin + steps.share(epoch + every_n_epoch, interval)


def check_metrics(monitors: Mapping[str, str], metrics: Collection[str]) -> None:
    """Raise ConfigError if a monitored metric is never computed.

    Args:
        monitors: what `monitored` returned.
        metrics: names of those that a validation computes; empty if there is no validation part.
    """
    for key, metric in monitors.items():
        if metric in metrics:
            continue
        remedy = "data.datasets has no validation part: add one."
        if metrics:
            remedy = f"Use one of {', '.join(metrics)}."
        raise ConfigError(f"{key}={metric} is never computed. {remedy}{did_you_mean(nearest(metric, metrics))}")


def monitored(
    config: Config, *, callbacks: Mapping[str, Callback] | None = None, checkpoints: CheckpointManager | None = None
) -> dict[str, str]:
    """Return the metrics that are monitored, by config key.

    Args:
        callbacks: those of the trainer, once it is built: a task may have brought some.
        checkpoints: the trainer's, which may monitor what the task says.
    """
    metrics = {"scheduler.monitor": config.scheduler.monitor}
    if config.checkpoint.enabled:
        metrics["checkpoint.monitor"] = config.checkpoint.monitor
    if checkpoints is not None:
        metrics["checkpoint.monitor"] = checkpoints.monitor
    for name, node in config.callbacks.items():
        metrics[f"callbacks.{name}.monitor"] = node.get("monitor")
    for name, callback in (callbacks or {}).items():
        if isinstance(callback, EarlyStopping):
            metrics[f"callbacks.{name}.monitor"] = callback.monitor
    return {key: metric for key, metric in metrics.items() if metric is not None}
