"""Build the learning-rate schedule of an optimizer, or of each of several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from framework.config.optimizers import OptimizerConfig
from framework.config.schema import Node, SchedulerConfig
from framework.config.targets import SCHEDULE_LENGTHS, requires, takes
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
    # Without names, one option of the configuration made the optimizer, or all of several.
    if not configs[0].name:
        return build_scheduler(settings, optimizer, length(""))
    assert isinstance(optimizer, Optimizers)
    schedules: dict[str, Schedule | Schedules] = {}
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
) -> Schedule | Schedules:
    """Return the learning-rate schedule of one optimizer, or all of several.

    Args:
        total_steps: steps of the scheduler in the whole run, counted in `settings.interval`; None if unknown.
            `settings.total_steps` takes precedence.

    Raises:
        ConfigError: if the scheduler needs a length and none is known, takes none but one is set, or is too short.
    """
    node = settings.schedule
    if node is None:
        return Schedule(None, settings)
    keyword = next((name for name in SCHEDULE_LENGTHS if takes(node, name)), "total_steps")
    length = _length(node, settings, total_steps, key=key, keyword=keyword)
    supplied = {}
    if length is not None:
        supplied[keyword] = length
    rebuild = Rebuild.of(optimizer, partial(build_object, key, node, **supplied))
    scheduler = rebuild.make(optimizer)
    if scheduler is None:
        return Schedule(None, settings)
    if isinstance(scheduler, list):
        schedules = {}
        for number, own in enumerate(scheduler):
            _check_is_scheduler(own.scheduler, key, node, is_stepped=own.step is None)
            schedules[str(number)] = _own_schedule(own, settings, length=length, rebuild=rebuild)
        return Schedules(schedules)
    if isinstance(scheduler, LRSchedulerConfig):
        _check_is_scheduler(scheduler.scheduler, key, node, is_stepped=scheduler.step is None)
        return _own_schedule(scheduler, settings, length=length, rebuild=rebuild)

    _check_is_scheduler(scheduler, key, node)
    if isinstance(scheduler, OneCycleLR) and total_steps is not None and scheduler.total_steps < total_steps:
        raise ConfigError(
            f"{node['_target_']} ends after {scheduler.total_steps} steps and can't continue, and the run has "
            f"{total_steps}.\nSet its total_steps to at least that, or train for fewer steps."
        )
    return Schedule(scheduler, settings, total_steps=length, run_steps=total_steps, rebuild=rebuild)


def _own_schedule(
    own: LRSchedulerConfig, settings: SchedulerConfig, *, length: int | None, rebuild: Rebuild
) -> Schedule:
    """Return the schedule of a scheduler that came with its own interval.

    The run's length isn't known in that: `total_steps` is counted in the interval of the configuration.
    """
    settings = replace(settings, interval=own.interval, monitor=own.monitor)  # type: ignore[arg-type]
    return Schedule(own.scheduler, settings, total_steps=length, own=own, rebuild=rebuild)


def _check_is_scheduler(scheduler: object, key: str, node: Node, *, is_stepped: bool = True) -> None:
    """Raise TargetError for what is no scheduler. is_stepped: by its own `step`, as all of torch's are."""
    expected = "a torch.optim.lr_scheduler.LRScheduler"
    is_known = isinstance(scheduler, LRScheduler)
    if not is_stepped:
        expected = "a scheduler with state_dict and load_state_dict"
        is_known = hasattr(scheduler, "state_dict") and hasattr(scheduler, "load_state_dict")
    if not is_known:
        raise wrong_result(key, node, scheduler, expected=expected)


def _length(node: Node, settings: SchedulerConfig, total_steps: int | None, *, key: str, keyword: str) -> int | None:
    """Return the scheduler's length; None if it has none. Raises ConfigError as `build_scheduler` does.

    keyword: what the target calls its length.
    """
    is_set_in_node = keyword in node
    if is_set_in_node or not takes(node, keyword):
        if settings.total_steps is not None:
            reason = f"{node['_target_']} takes no {keyword}"
            if is_set_in_node:
                reason = f"{key}.{keyword} is set too"
            raise ConfigError(f"scheduler.total_steps={settings.total_steps} has no effect: {reason}. Set it to null.")
        length: int | None = node.get(keyword)
        return length

    if settings.total_steps is not None:
        return settings.total_steps
    if total_steps is None and requires(node, keyword):
        raise ConfigError(
            f"{node['_target_']} must know when training ends, and that isn't known: trainer.max_steps is null, "
            "and so is max_epochs, or the number of steps in an epoch of a stream is unknown.\n"
            "Set trainer.max_steps, or scheduler.total_steps."
        )
    return total_steps
