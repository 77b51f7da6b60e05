"""Train and evaluate on less: `trainer.fast_dev_run`, `overfit_batches`, and the first samples of a dataset."""

from __future__ import annotations

from dataclasses import replace

from torch.utils.data import IterableDataset, Subset

from framework.config.schema import Config, TrainerConfig
from framework.data.batching import BatchPlan, count_windows
from framework.data.epochs import EpochSizes, apply_limit
from framework.data.loader import dataset_size
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
    few = first_samples(datasets.train, windows * plan.global_batch_size)
    return Datasets(train=few, val=few, test=None, collate_fn=datasets.collate_fn_of("train"))


def train_sizes(datasets: Datasets, *, processes: int = 1) -> EpochSizes:
    """Return the samples of each epoch. Raises DataError if there are none, or fewer than `processes`."""
    size = dataset_size(datasets.train, split="train", processes=processes)
    return EpochSizes(size, datasets.sampler)


def first_samples(dataset: MapDataset, count: int) -> MapDataset:
    """Return the first `count` samples, or all if there are fewer."""
    if count >= len(dataset):
        return dataset
    return Subset(dataset, range(count))  # type: ignore[arg-type]
