"""The learning-rate schedule: when its scheduler steps, and its state in checkpoints."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, final

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from framework.config.schema import SchedulerConfig
from framework.config.suggest import did_you_mean, nearest
from framework.errors import ConfigError
from framework.optim.schedule_replay import Change, Rebuild, position_of, replay_with_changes
from framework.system.rank_log import logger, warn
from framework.types import LRSchedulerConfig

# Keys in `state_dict`, beside the scheduler's own.
_LENGTH = "schedule_total_steps"
_RUN_LENGTH = "schedule_run_steps"
_CALLS = "schedule_calls"

# What to choose, for messages.
_AS_IT_WAS = "trainer.max_epochs, trainer.max_steps, the batch size and the number of processes as they were."
_NEW_RUN = "a new run from these weights, with init_from."


@final
class Schedule:
    """A scheduler, or none, and its interval. The trainer calls `step_after` after every step, epoch and validation.

    ReduceLROnPlateau steps after validations, by the metric `monitor`; all others after steps or epochs.

    Args:
        total_steps: the scheduler's length, counted in `settings.interval`; None if it has none.
        run_steps: the run's length, counted in the same way; None if unknown.
        own: the frequency and strictness that the scheduler came with, if any.
        rebuild: builds the scheduler again, for `change_settings`.
    """

    def __init__(
        self,
        scheduler: LRScheduler | None,
        settings: SchedulerConfig,
        *,
        total_steps: int | None = None,
        run_steps: int | None = None,
        own: LRSchedulerConfig | None = None,
        rebuild: Rebuild | None = None,
    ) -> None:
        self._scheduler: Any = scheduler
        self._rebuild = rebuild
        self._settings = settings
        self._total_steps = total_steps
        self._run_steps = run_steps
        # The scheduler steps at each n-th call of `step_after`. Calls are counted only if n isn't 1.
        self._frequency = 1
        self._calls = 0
        # If a metric that validation doesn't compute is an error.
        self._is_strict = True
        # Called with the scheduler and the metric or None, if that is how it is stepped.
        self._step: Callable[[Any, Any], None] | None = None
        if own is not None:
            self._frequency = own.frequency
            self._is_strict = own.strict
            self._step = own.step
        self._steps_after: str = settings.interval
        is_stepped = own is None or own.interval != "never"
        if isinstance(scheduler, ReduceLROnPlateau) and is_stepped:
            self._steps_after = "validation"

    def step_after(self, what: str, metrics: Mapping[str, float] | None = None) -> None:
        """Step the scheduler if it is due after a `step`, an `epoch` or, with its metrics, a `validation`."""
        if self._scheduler is None or self._steps_after != what:
            return
        if self._frequency > 1:
            self._calls += 1
            if self._calls % self._frequency:
                return
        if metrics is None:
            if self._step is None:
                self._scheduler.step()
            else:
                self._step(self._scheduler, None)
            return

        monitor = str(self._settings.monitor)
        if monitor in metrics:
            if self._step is None:
                self._scheduler.step(metrics[monitor])
            else:
                self._step(self._scheduler, metrics[monitor])
        elif self._is_strict:
            raise ConfigError(
                f"The learning-rate schedule monitors {monitor}, which validation doesn't compute: it computes "
                f"{', '.join(metrics)}.{did_you_mean(nearest(monitor, metrics))}"
            )

    def state_dict(self) -> dict[str, Any]:
        if self._scheduler is None:
            return {}
        state: dict[str, Any] = self._scheduler.state_dict()
        state = {**state, _LENGTH: self._total_steps, _RUN_LENGTH: self._run_steps}
        if self._frequency > 1:
            state[_CALLS] = self._calls
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned, after the optimizer's state.

        Raises:
            ConfigError: if the state is of a schedule of another length, unless `settings.total_steps` is set and the
                schedule can be stretched; and if the schedule is over, unless the run was planned to be longer.
        """
        if self._scheduler is None:
            return
        state = dict(state)
        saved_length = state.pop(_LENGTH, None)
        planned_steps = state.pop(_RUN_LENGTH, None)
        self._calls = state.pop(_CALLS, 0)

        self._check_end(position_of(state), planned_steps=planned_steps)
        if self._total_steps is None or saved_length in (None, self._total_steps):
            self._scheduler.load_state_dict(state)
        elif self._can_stretch and self._settings.total_steps is not None:
            self._load_stretched(state, saved_length)
        else:
            raise self._other_length(position_of(state), saved_length)

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Return True if a state from `state_dict` is of a schedule of this length, in a run of this length."""
        if self._scheduler is None or self._total_steps is None:
            return True
        return state.get(_LENGTH) == self._total_steps and state.get(_RUN_LENGTH) in (None, self._run_steps)

    def begin_at(self, *, steps: int, epochs: int) -> None:
        """Step a schedule that is new, and its optimizer, as often as so many steps and epochs would have stepped it.

        One that steps after validations stays as it is. It takes about 10 µs a step.
        """
        with warnings.catch_warnings():
            # Torch warns that the optimizer makes no steps.
            warnings.simplefilter("ignore")
            for _ in range(steps):
                self.step_after("step")
            for _ in range(epochs):
                self.step_after("epoch")

    @property
    def _can_stretch(self) -> bool:
        """True if the rate is a function of the step, which may know another length."""
        return isinstance(self._scheduler, LambdaLR)

    def _load_stretched(self, state: Mapping[str, Any], saved_length: int) -> None:
        """Load the state of a schedule of another length: its position and base rates, but not its functions."""
        interval = self._settings.interval
        logger.info("the schedule is stretched from %d to %d %ss", saved_length, self._total_steps, interval)
        base_lrs = state["base_lrs"]
        # None keeps this run's function of each group.
        self._scheduler.load_state_dict({**state, "lr_lambdas": [None] * len(base_lrs)})
        groups = self._scheduler.optimizer.param_groups
        for group, base_lr, factor in zip(groups, base_lrs, self._scheduler.lr_lambdas, strict=True):
            group["lr"] = base_lr * factor(state["last_epoch"])

    def _other_length(self, position: int | None, saved_length: int) -> ConfigError:
        """Return the error for a state of a schedule of another length."""
        interval = self._settings.interval
        choices = []
        if position is None or position < saved_length:
            choice = f"scheduler.total_steps={saved_length} keeps the schedule as it was"
            if self._run_steps is not None and self._run_steps > saved_length:
                choice += f"; the last {self._run_steps - saved_length} {interval}s have its last learning rate"
            choices.append(f"{choice}.")
        if self._can_stretch:
            choices.append(f"scheduler.total_steps={self._total_steps} stretches it.")
        choices.append(_AS_IT_WAS)
        choices.append(_NEW_RUN)
        return ConfigError(
            f"The learning-rate schedule was made for {saved_length} {interval}s, and this run has "
            f"{self._total_steps}. To resume, choose:\n{_listed(choices)}"
        )

    def _check_end(self, position: int | None, *, planned_steps: int | None) -> None:
        """Raise ConfigError if the schedule is over at `position` and the run isn't, unless that was planned.

        planned_steps: the run's length when the state was saved; None in earlier checkpoints.
        """
        length = self._total_steps
        steps = self._run_steps
        interval = self._settings.interval
        if length is None or steps is None or position is None or position >= steps:
            return

        if planned_steps is None:
            was_planned = self._settings.total_steps is not None
        else:
            was_planned = planned_steps > length
        if was_planned:
            return

        if position >= length:
            choices = [_AS_IT_WAS, _NEW_RUN]
            if self._can_stretch:
                choices.insert(0, f"scheduler.total_steps={steps} stretches it.")
            raise ConfigError(
                f"The learning-rate schedule is over: it has {length} {interval}s, and this run continues after "
                f"{position} of them to {steps}, with the schedule's last learning rate. To resume, choose:\n"
                f"{_listed(choices)}"
            )
        if length < steps:
            warn(
                f"The learning-rate schedule ends after {length} {interval}s, and the run after {steps}: the last "
                f"{steps - length} have the schedule's last learning rate"
            )

    def change_settings(self, optimizer: Optimizer, changes: Mapping[int, Mapping[str, Change]], *, key: str) -> None:
        """Give the optimizer settings that have changed since the checkpoint; learning rates follow the schedule.

        Later rates are exactly those of a schedule that had the new settings from its first step. Call it once all
        states are loaded.

        Args:
            changes: number of the group → name → its values before and now.
            key: of the optimizer, for messages.

        Raises:
            ConfigError: for a setting that the schedule sets itself, and for a schedule whose rates with other settings
                aren't known.
        """
        if self._scheduler is not None:
            assert self._rebuild is not None
            replay_with_changes(self._scheduler, self._rebuild, optimizer, changes, key=key)
            return
        for number, group_changes in changes.items():
            group = optimizer.param_groups[number]
            for name, change in group_changes.items():
                if name == "lr":
                    group[name] = change.scaled(group.get(name))
                else:
                    group[name] = change.now


@final
class Schedules:
    """The schedules of several optimizers by name, as one."""

    def __init__(self, named: Mapping[str, Schedule | Schedules]) -> None:
        self.named = dict(named)

    def step_after(self, what: str, metrics: Mapping[str, float] | None = None) -> None:
        for schedule in self.named.values():
            schedule.step_after(what, metrics)

    def state_dict(self) -> dict[str, Any]:
        return {name: schedule.state_dict() for name, schedule in self.named.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, schedule in self.named.items():
            schedule.load_state_dict(state[name])

    def fits(self, state: Mapping[str, Any]) -> bool:
        return all(name in state and schedule.fits(state[name]) for name, schedule in self.named.items())

    def begin_at(self, *, steps: int, epochs: int) -> None:
        for schedule in self.named.values():
            schedule.begin_at(steps=steps, epochs=epochs)


def with_calls(state: Mapping[str, Any], calls: int) -> dict[str, Any]:
    """Return what `Schedule` loads, from a scheduler's own state. calls: how often it was to be stepped."""
    return {**state, _CALLS: calls}


def scheduler_states(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the schedulers' own states from what `Schedule` or `Schedules` has saved."""
    if not state:
        return []
    of_several = [value for name, value in state.items() if name.isdigit()]
    states = []
    for own in of_several or [state]:
        states.append({name: value for name, value in own.items() if name not in (_LENGTH, _RUN_LENGTH, _CALLS)})
    return states


def cosine(optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, min_factor: float = 0.0) -> LambdaLR:
    """Linear warm-up to the optimizer's learning rate, then half a cosine down to `min_factor` times it.

    Step s of the warm-up has (s + 1) / warmup_steps of the rate; after `total_steps` it stays at the end's.
    SGDR, https://arxiv.org/abs/1608.03983, without restarts. Raises ConfigError for numbers out of range.
    """
    if not 0 <= warmup_steps < total_steps:
        raise ConfigError(
            f"warmup_steps={warmup_steps} must be at least 0 and less than total_steps={total_steps}.\n"
            "Shorten the warm-up or train longer. If this run is the first part of a longer one, set "
            "scheduler.total_steps to the steps of all parts."
        )
    if not 0 <= min_factor <= 1:
        raise ConfigError(f"min_factor={min_factor} must be within 0 and 1: it is a share of the learning rate.")

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        done = min((step - warmup_steps) / (total_steps - warmup_steps), 1.0)
        return min_factor + (1 - min_factor) * (1 + math.cos(math.pi * done)) / 2

    return LambdaLR(optimizer, factor)


def _listed(choices: list[str]) -> str:
    return "\n".join(f"  - {choice}" for choice in choices)
