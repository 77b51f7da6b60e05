"""What a resumed run may change of its fold, optimizer and schedule, and how the restored optimizer gets it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from framework.config.optimizers import OptimizerConfig, optimizer_configs
from framework.config.schema import Config
from framework.errors import ConfigError
from framework.optim.schedule import Schedules
from framework.optim.schedule_replay import Change
from framework.system.rank_log import logger
from framework.training.train_state import TrainState

Node = Mapping[str, Any]


def check_optimizer_and_schedule(config: Config, saved: dict[str, Any]) -> None:
    """Raise ConfigError if the optimizer's class, its groups or the schedule are others than in the checkpoint.

    Restoring the saved state would silently undo such a change.
    """
    configs_now = optimizer_configs(config.optimizer)
    configs_before = optimizer_configs(saved["optimizer"])
    schedules: list[tuple[Node, Node]] = [(config.scheduler.schedule or {}, saved["scheduler"]["schedule"] or {})]
    if len(configs_now) == len(configs_before):
        for now, before in zip(configs_now, configs_before, strict=True):
            schedules.append((now.own_schedule, before.own_schedule))

    check_optimizer(config.optimizer, saved["optimizer"])
    for node_now, node_before in schedules:
        _check_same_target("schedule", node_now, node_before)
        _check_same_schedule(node_now, node_before)


def check_optimizer(section: Node, saved: Node) -> None:
    """Raise ConfigError if an optimizer's class or its groups are others than in the checkpoint.

    Args:
        section: the section `optimizer` of the configuration.
        saved: that of the checkpoint.
    """
    configs_now = optimizer_configs(section)
    configs_before = optimizer_configs(saved)
    if len(configs_now) == len(configs_before):
        for now, before in zip(configs_now, configs_before, strict=True):
            _check_same_target("optimizer", now.node, before.node)
    if _choices(configs_now) != _choices(configs_before):
        raise ConfigError(
            "resume can't change which optimizer or group a parameter belongs to: the names and `params` in the "
            "section optimizer are others than in the checkpoint.\n"
            "Keep them, or start a new run from these weights with init_from."
        )


def check_fold(config: Config, saved: dict[str, Any]) -> None:
    """Raise ConfigError if another fold is held out than in the checkpoint: its samples were trained on."""
    now = [config.data.folds, config.data.fold]
    before = [saved["data"].get("folds"), saved["data"].get("fold")]
    if now == before:
        return
    texts = []
    for name, value in zip(("folds", "fold"), before, strict=True):
        texts.append(f"data.{name}={'null' if value is None else value}")
    raise ConfigError(
        "resume can't hold out another fold: it would validate on samples that were trained on. The run has "
        f"{' '.join(texts)}.\nKeep that, or start a new run with rerun."
    )


def change_optimizers(config: Config, saved: dict[str, Any], state: TrainState) -> None:
    """Set what has changed since the checkpoint in the restored optimizers, whose state has the old values."""
    texts = []
    configs_now = optimizer_configs(config.optimizer)
    configs_before = optimizer_configs(saved["optimizer"])
    # Without names, one option of the configuration made all optimizers.
    optimizers = state.optimizers if configs_now[0].name else [state.optimizer]
    for now, before, optimizer in zip(configs_now, configs_before, optimizers, strict=True):
        # By the number of a parameter group, then by the name of a setting.
        changes: dict[int, dict[str, Change]] = {}
        for number, group in enumerate(optimizer.param_groups):
            label = group.get("name", now.name)
            settings_now = now.settings(label)
            settings_before = before.settings(label)
            for name in {**settings_before, **settings_now}:
                if name not in group and settings_now.get(name) != settings_before.get(name):
                    raise _without_effect(now, name, group)
            group_changes = _changes_of_group(optimizer, settings_now, settings_before)
            if group_changes:
                changes[number] = group_changes
            key = now.key
            if label != now.name:
                key += f" ({label})"
            texts += [f"{key}.{name}={change.now}" for name, change in group_changes.items()]
        if changes:
            schedule = state.schedule
            if isinstance(schedule, Schedules) and now.name:
                schedule = schedule.named[now.name]
            if isinstance(schedule, Schedules):
                raise ConfigError(f"resume can't change {now.key}: it has several schedules.")
            schedule.change_settings(optimizer, changes, key=now.key)
    if texts:
        logger.info("changed since the checkpoint: %s", ", ".join(texts))


def _changes_of_group(optimizer: Optimizer, now: Node, before: Node) -> dict[str, Change]:
    """Return the settings of a parameter group that differ, by name. One that isn't set has the class's default."""
    parameters = inspect.signature(type(optimizer)).parameters
    changes = {}
    for name in {**before, **now}:
        default = inspect.Parameter.empty
        if name in parameters:
            default = parameters[name].default
        change = Change(before.get(name, default), now.get(name, default))
        # A setting that only one of the two has, and that has no default, can't be compared.
        is_known = inspect.Parameter.empty not in change
        if is_known and change.before != change.now:
            changes[name] = change
    return changes


def _without_effect(optimizer: OptimizerConfig, name: str, group: Node) -> ConfigError:
    """Return the error for an argument of the target that is no setting of the optimizer which the target returns.

    Only the target knows what it makes of it, and the restored optimizer has the values of the checkpoint.
    """
    settings = [key for key in group if key in optimizer.node]
    return ConfigError(
        f"resume can't change {optimizer.key}.{name}: it is an argument of {optimizer.node['_target_']}, not a setting "
        f"of the optimizer that the checkpoint has. Those that may change: {', '.join(settings)}.\n"
        f"Keep {name} as it was, or start a new run from these weights with init_from."
    )


def _choices(configs: list[OptimizerConfig]) -> list[str]:
    """Return how each optimizer chooses its parameters, in a form that can be compared."""
    return [repr(config.choice) for config in configs]


def _check_same_target(kind: str, now: Node, before: Node) -> None:
    """Raise ConfigError for another class. kind: what the nodes are, for messages."""
    if now.get("_target_") != before.get("_target_"):
        raise ConfigError(
            f"resume can't continue with {_described(kind, now)}: the checkpoint has {_described(kind, before)}.\n"
            "Keep that, or start a new run from these weights with init_from."
        )


def _check_same_schedule(now: Node, before: Node) -> None:
    """Raise ConfigError for a schedule with other arguments."""
    changed = []
    for name in {**before, **now}:
        if now.get(name) != before.get(name):
            changed.append(f"{name}={now.get(name)} (it was {before.get(name)})")
    if changed:
        raise ConfigError(
            f"resume can't change a schedule that has begun: scheduler.schedule.{', '.join(changed)}.\n"
            "Keep it as it was, or start a new run from these weights with init_from."
        )


def _described(kind: str, node: Node) -> str:
    if not node:
        return f"no {kind}"
    return f"the {kind} {node['_target_']}"
