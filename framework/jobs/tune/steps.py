"""Training steps whose number is fixed, however many epochs they take, and the configuration that they have."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice

from framework.config.schema import Config
from framework.data.batching import BatchPlan
from framework.data.loader import MapLoader, TrainLoader
from framework.training.trainer import Trainer
from framework.types import Window


def tuned_config(config: Config) -> Config:
    """Return the configuration without callbacks, loggers, schedule and checkpoints."""
    return replace(
        config,
        callbacks={},
        logger={},
        scheduler=replace(config.scheduler, schedule=None, monitor=None),
        checkpoint=replace(config.checkpoint, enabled=False),
        trainer=replace(config.trainer, limit_train_batches=None, profiler=None),
    )


def full_steps(loader: MapLoader, plan: BatchPlan) -> MapLoader:
    """Return a loader of steps as planned, without a short one at the end of an epoch; at least one."""
    return loader.replanned(plan, limit=max(1, loader.sizes.of(0) // plan.global_batch_size))


def train_steps(trainer: Trainer, loader: TrainLoader, num_steps: int) -> Iterator[float]:
    """Train `num_steps` steps, over as many epochs as that takes, and yield the seconds of each."""
    trainer.state.slots.reset()
    for window in islice(_windows(loader), num_steps):
        began = time.perf_counter()
        trainer.train_step(window)
        trainer.context.wait_for_devices()
        yield time.perf_counter() - began


def _windows(loader: TrainLoader) -> Iterator[Window]:
    """Yield the batches of one step after another, epoch after epoch, without end."""
    for epoch in count():
        yield from loader.epoch(epoch)
