"""Change the settings of an optimizer whose schedule has begun, as if they had been set from the start.

A second scheduler is built with the settings as they were and a third with those of now, both for an optimizer that
trains nothing, and stepped to where the checkpoint is. If the second one has the checkpoint's learning rates, those of
the third are the ones to continue with.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from framework.errors import ConfigError
from framework.types import LRSchedulerConfig


class Change(NamedTuple):
    """The value of an optimizer's setting when the checkpoint was saved, and now. None: not set."""

    before: Any
    now: Any

    def scaled(self, present: Any) -> Any:
        """Return the new value, times the factor that something else, such as a callback, had applied to the old."""
        if not self.before or present is None or present == self.before:
            return self.now
        return present * (self.now / self.before)


# The change of each setting, by the number of its parameter group and its name.
Changes = Mapping[int, Mapping[str, Change]]


@final
class Rebuild(NamedTuple):
    """Builds the scheduler again, for an optimizer with the groups from before the first one was built."""

    make: Callable[[Optimizer], Any]
    groups: Sequence[Mapping[str, Any]]
    defaults: Mapping[str, Any]

    @classmethod
    def of(cls, optimizer: Optimizer, make: Callable[[Optimizer], Any]) -> Rebuild:
        """Note the groups of an optimizer that has no scheduler yet."""
        groups = []
        for group in optimizer.param_groups:
            settings = dict(group)
            del settings["params"]
            groups.append(settings)
        return cls(make, groups, dict(optimizer.defaults))


def replay_with_changes(scheduler: Any, rebuild: Rebuild, optimizer: Optimizer, changes: Changes, *, key: str) -> None:
    """Give the optimizer and its scheduler, whose states are loaded, settings that have changed since the checkpoint.

    Args:
        key: The key of the optimizer, for messages.

    Raises ConfigError for a setting that the schedule sets itself, and for a schedule whose rates with other settings
    aren't known.
    """
    kind = type(scheduler).__name__
    before = _Replay(rebuild, changes, "before")
    now = _Replay(rebuild, changes, "now")

    position: int | None
    if isinstance(scheduler, ReduceLROnPlateau):
        position = _num_reductions(_Replay(rebuild, changes, "before"), optimizer, key=key)
    else:
        position = position_of(scheduler.state_dict())
    if position is None:
        raise ConfigError(
            f"resume can't change {key}: {kind} doesn't say how often it has moved.\n"
            "Keep the settings as they were, or start a new run from these weights with init_from."
        )
    before.step(position)
    now.step(position)
    _check_replayed(before, optimizer, kind, key=key)

    for number, group_changes in changes.items():
        group = optimizer.param_groups[number]
        for name in (*group_changes, "initial_lr"):
            if name in now.groups[number]:
                group[name] = now.groups[number][name]
    # The state of ReduceLROnPlateau is about metrics, and stays.
    if not isinstance(scheduler, ReduceLROnPlateau):
        scheduler.load_state_dict(now.scheduler.state_dict())

    for number, group_changes in changes.items():
        for name, change in group_changes.items():
            _check_effect(name, change, before, now, number=number, kind=kind, key=key)


def position_of(state: Mapping[str, Any]) -> int | None:
    """Return how many steps a scheduler with this state has made; None if it doesn't say."""
    if "last_epoch" in state:
        return int(state["last_epoch"])
    # A ChainedScheduler steps all of its schedulers together.
    states_inside = state.get("_schedulers")
    if not states_inside:
        return None
    return position_of(states_inside[0])


class _Replay:
    """Another scheduler at its first step, with the settings as they were `before` or are `now`."""

    def __init__(self, rebuild: Rebuild, changes: Changes, which: Literal["before", "now"]) -> None:
        groups = [dict(group) for group in rebuild.groups]
        for number, group_changes in changes.items():
            for name, change in group_changes.items():
                groups[number][name] = getattr(change, which)
        for group in groups:
            group["params"] = [nn.Parameter(torch.zeros(1))]

        optimizer = Optimizer(groups, dict(rebuild.defaults))
        scheduler = rebuild.make(optimizer)
        if isinstance(scheduler, LRSchedulerConfig):
            scheduler = scheduler.scheduler
        self.scheduler: Any = scheduler
        self.groups = optimizer.param_groups

    @property
    def rates(self) -> list[float]:
        return [group["lr"] for group in self.groups]

    def step(self, number: int) -> None:
        """Step the scheduler, or reduce the rates as ReduceLROnPlateau does. About 10 µs a step."""
        if isinstance(self.scheduler, ReduceLROnPlateau):
            for _ in range(number):
                self._reduce()
            return
        with warnings.catch_warnings():
            # Torch warns that the optimizer makes no steps.
            warnings.simplefilter("ignore")
            for _ in range(number):
                self.scheduler.step()

    def _reduce(self) -> None:
        for group, min_lr in zip(self.groups, self.scheduler.min_lrs, strict=True):
            reduced = max(group["lr"] * self.scheduler.factor, min_lr)
            if group["lr"] - reduced > self.scheduler.eps:
                group["lr"] = reduced


def _num_reductions(replay: _Replay, optimizer: Optimizer, *, key: str) -> int:
    """Return how often ReduceLROnPlateau has reduced the rates. Raises ConfigError if that can't be known."""
    saved_rates = [group["lr"] for group in optimizer.param_groups]
    number = 0
    while True:
        rates = replay.rates
        replay.step(1)
        is_reduced = rates != replay.rates
        is_here = all(math.isclose(rate, saved, rel_tol=1e-6) for rate, saved in zip(rates, saved_rates, strict=True))
        if is_here and not is_reduced:
            raise ConfigError(
                f"resume can't change {key}.lr: ReduceLROnPlateau has reached its min_lr, so how often it would "
                "have reduced another learning rate isn't known.\n"
                "Keep the learning rate, or start a new run from these weights with init_from."
            )
        # If the rates can't be reduced any more, they differ from the checkpoint's, which `_check_replayed` reports.
        if is_here or not is_reduced:
            return number
        number += 1


def _check_replayed(before: _Replay, optimizer: Optimizer, kind: str, *, key: str) -> None:
    """Raise ConfigError if replaying the schedule doesn't give the checkpoint's rates. kind: the scheduler's class."""
    for group, rate in zip(optimizer.param_groups, before.rates, strict=True):
        if not math.isclose(group["lr"], rate, rel_tol=1e-6, abs_tol=1e-15):
            raise ConfigError(
                f"resume can't change {key}.lr: the checkpoint's learning rate is {group['lr']:g}, where "
                f"{kind} with the settings of that run gives {rate:g}. "
                "Something else sets it, such as a callback, or the schedule depends on more than the step.\n"
                "Keep the settings as they were, or start a new run from these weights with init_from."
            )


def _check_effect(
    name: str, change: Change, before: _Replay, now: _Replay, *, number: int, kind: str, key: str
) -> None:
    """Raise ConfigError if the schedule sets what has changed, so that the change would be lost."""
    if name == "lr":
        is_lost = before.rates[number] == now.rates[number]
        if is_lost:
            # It may be by chance, at the end of a decay: what follows decides.
            before.step(1)
            now.step(1)
            is_lost = before.rates[number] == now.rates[number]
    else:
        is_lost = now.groups[number][name] != change.now
    if is_lost:
        raise ConfigError(
            f"{key}.{name}={change.now} has no effect: {kind} sets it from its own "
            f"arguments.\nresume can't change a schedule that has begun. Keep {key}.{name}={change.before}, or "
            "start a new run from these weights with init_from."
        )
