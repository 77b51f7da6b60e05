"""Build the learning-rate schedule of an optimizer, or of each of several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from framework.config.optimizers import OptimizerConfig
from framework.config.schema import Node, SchedulerConfig
from framework.config.targets import requires, takes
from framework.engine.builders.objects import build_object, wrong_result
from framework.errors import ConfigError
from framework.optim.schedule import Schedule, Schedules
from framework.optim.schedule_replay import Rebuild
from framework.optim.several import Optimizers
from framework.types import LRSchedulerConfig


def build_schedule(
    settings: SchedulerConfig,
    optimizer: Optimizer,
    configs: Sequence[OptimizerConfig],
    *,
    length: Callable[[str], int | None],
) -> Schedule | Schedules:
    """Return the learning-rate schedule, or that of each of several optimizers.

    length: returns the steps of an optimizer's scheduler in the whole run, given its name; see `build_scheduler`.
    """
    if not isinstance(optimizer, Optimizers):
        return build_scheduler(settings, optimizer, length(""))
    schedules = {}
    for config in configs:
        key = "scheduler.schedule"
        own_settings = settings
        # `...` means that the optimizer has no schedule of its own.
        if config.schedule is not ...:
            key = f"{config.key}.schedule"
            own_settings = replace(settings, schedule=config.schedule)
        own_length = length(config.name)
        schedules[config.name] = build_scheduler(own_settings, optimizer.named[config.name], own_length, key=key)
    return Schedules(schedules)


def build_scheduler(
    settings: SchedulerConfig, optimizer: Optimizer, total_steps: int | None, *, key: str = "scheduler.schedule"
) -> Schedule:
    """Return the learning-rate schedule of one optimizer.

    Args:
        total_steps: steps of the scheduler in the whole run, counted in `settings.interval`; None if unknown.
            `settings.total_steps` takes precedence.

    Raises:
        ConfigError: if the scheduler needs a length and none is known, takes none but one is set, or is too short.
    """
    node = settings.schedule
    if node is None:
        return Schedule(None, settings)
    length = _length(node, settings, total_steps, key=key)
    supplied = {}
    if length is not None:
        supplied["total_steps"] = length
    rebuild = Rebuild.of(optimizer, partial(build_object, key, node, **supplied))
    scheduler = rebuild.make(optimizer)
    if scheduler is None:
        return Schedule(None, settings)

    run_steps = total_steps
    own_settings = None
    if isinstance(scheduler, LRSchedulerConfig):
        own_settings = scheduler
        scheduler = own_settings.scheduler
        settings = replace(settings, interval=own_settings.interval, monitor=own_settings.monitor)
        # `total_steps` is counted in the interval of the configuration, the scheduler's steps in its own.
        run_steps = None
    if not isinstance(scheduler, LRScheduler):
        raise wrong_result(key, node, scheduler, expected="a torch.optim.lr_scheduler.LRScheduler")
    if isinstance(scheduler, OneCycleLR) and run_steps is not None and scheduler.total_steps < run_steps:
        raise ConfigError(
            f"{node['_target_']} ends after {scheduler.total_steps} steps and can't continue, and the run has "
            f"{run_steps}.\nSet its total_steps to at least that, or train for fewer steps."
        )
    return Schedule(scheduler, settings, total_steps=length, run_steps=run_steps, own=own_settings, rebuild=rebuild)


def _length(node: Node, settings: SchedulerConfig, total_steps: int | None, *, key: str) -> int | None:
    """Return the scheduler's length; None if it has none. Raises ConfigError as `build_scheduler` does."""
    is_set_in_node = "total_steps" in node
    if is_set_in_node or not takes(node, "total_steps"):
        if settings.total_steps is not None:
            reason = f"{node['_target_']} takes no total_steps"
            if is_set_in_node:
                reason = f"{key}.total_steps is set too"
            raise ConfigError(f"scheduler.total_steps={settings.total_steps} has no effect: {reason}. Set it to null.")
        length: int | None = node.get("total_steps")
        return length

    if settings.total_steps is not None:
        return settings.total_steps
    if total_steps is None and requires(node, "total_steps"):
        raise ConfigError(
            f"{node['_target_']} must know when training ends, and that isn't known: trainer.max_steps is null, "
            "and so is max_epochs, or the number of steps in an epoch of a stream is unknown.\n"
            "Set trainer.max_steps, or scheduler.total_steps."
        )
    return total_steps
