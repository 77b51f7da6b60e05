"""What can't go with a stream, and how long one is taken: known once the datasets are built."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from framework.checkpoint.plain import check_plain
from framework.config.parse import raise_mistakes
from framework.config.schema import Config, DataConfig, LoaderKind, StreamSharing, TrainerConfig
from framework.data.batching import BatchPlan
from framework.limits import steps_per_epoch
from framework.types import Datasets, Strategy, mixes_samples, num_stages

_LIMITS = {part: f"limit_{part}_batches" for part in Datasets._fields}


def streams_of(datasets: Datasets) -> list[str]:
    """The parts that are streams."""
    return [part for part, each in datasets._asdict().items() if isinstance(each, IterableDataset)]


def check_streams(config: Config, datasets: Datasets, strategy: Strategy) -> None:
    """Raise ConfigError with all that is asked of a stream and can't be, or of one where there is none."""
    parts = streams_of(datasets)
    mistakes = list(_of_streams(config, parts, strategy) if parts else _of_none(config.data))
    if len({id(getattr(datasets, part)) for part in parts}) < len(parts):
        mistakes.append(
            f"data.datasets gives one object for several of {', '.join(parts)}: as a stream it can be read in one "
            "place only at a time. Make one for each."
        )
    raise_mistakes(mistakes)


def check_state(state: Any) -> None:
    """Raise CheckpointError where a checkpoint can't hold what the train stream says of where it stands."""
    check_plain(state, name="the train stream's state_dict()")


def train_limit(settings: TrainerConfig, plan: BatchPlan) -> int | None:
    """Samples over all ranks that an epoch of a stream is cut to, or None. See `limits.train_windows`."""
    steps = steps_per_epoch(settings, plan, size=None)
    return None if steps is None else steps * plan.global_batch_size


def is_sharded(data: DataConfig) -> bool:
    """Whether each process reads a part of its own."""
    return data.stream is not StreamSharing.SHARED


def _of_none(data: DataConfig) -> Iterator[str]:
    if is_sharded(data):
        yield (
            f"data.stream={data.stream.value} says how processes share a stream, and data.datasets gives none: each "
            "part has a length, and every process its share of it. Leave it out."
        )


def _of_streams(config: Config, parts: list[str], strategy: Strategy) -> Iterator[str]:
    data, trainer = config.data, config.trainer
    if "train" in parts and data.shuffle:
        yield (
            "data.shuffle=true can't go with a train part that is a stream: its order is its own. Set "
            "data.shuffle=false, and shuffle in the dataset (its set_epoch(epoch) is called)."
        )
    if "train" in parts and data.loader is LoaderKind.RESIDENT:  # other parts may be streams beside one of known length
        yield (
            "data.loader=resident keeps a part in memory, and train is a stream, whose length nobody knows. Use "
            "data.loader=auto."
        )
    if "train" in parts and (data.num_workers or 0) > 1:
        yield (
            f"data.num_workers={data.num_workers} can't go with a train part that is a stream: several processes would "
            "read the same samples. Use data.num_workers=1, which has one read ahead, 0, or auto."
        )
    for part in parts:
        limit = getattr(trainer, _LIMITS[part])
        if isinstance(limit, float):
            yield (
                f"trainer.{_LIMITS[part]}={limit} is a share of the {part} part, which is a stream, whose length "
                "nobody knows. Write a whole number of batches."
            )
    if trainer.overfit_batches is not None:
        yield (
            f"trainer.overfit_batches can't go with a stream ({', '.join(parts)}): it takes the same batches again. "
            "Use trainer.limit_train_batches, or give data of which each sample can be asked for."
        )
    if is_sharded(data) and "train" in parts:
        yield from _of_shards(config, strategy)


def _of_shards(config: Config, strategy: Strategy) -> Iterator[str]:
    name = config.data.stream.value
    if mixes_samples(strategy):
        yield (
            f"data.stream={name} can't go with strategy.sync_batchnorm=true: what stands in for a process whose stream "
            "has ended would count in the statistics of all. Use data.stream=shared, or strategy.sync_batchnorm=false."
        )
    if num_stages(strategy) is not None:
        yield (
            f"data.stream={name} can't go with strategy=pipeline, whose stages pass what stands in for a process whose "
            "stream has ended like any batch. Use data.stream=shared, or another strategy."
        )
    if config.job == "parity":
        yield (
            f"data.stream={name} can't go with job=parity: how the stream is cut depends on the number of processes, "
            "which is what is compared. Use data.stream=shared."
        )
