"""Learning-rate schedules, gradient clipping, and the optimizer's step and state."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any, Literal, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from framework.config.schema import SchedulerConfig, TrainerConfig
from framework.config.suggest import did_you_mean, nearest
from framework.distributed.sharded import by_mesh, is_dtensor
from framework.distributed.sharded import total_norm as norm_of
from framework.errors import ConfigError
from framework.system.rank_log import logger, warn
from framework.types import LRSchedulerConfig

# Keys in `state_dict`, beside the scheduler's own.
_LENGTH = "schedule_total_steps"
_RUN_LENGTH = "schedule_run_steps"
_CALLS = "schedule_calls"
_AS_IT_WAS = "trainer.max_epochs, trainer.max_steps, the batch size and the number of processes as they were."
_NEW_RUN = "a new run from these weights, with init_from."
_FUSED_PAYS_FROM = 100_000  # elements in all parameters, on a CPU


@final
class Schedule:
    """A scheduler, or none, and its interval. The trainer calls `step_after` after every step, epoch and validation.

    ReduceLROnPlateau steps after validations, by the metric `monitor`; all others after steps or epochs.

    total_steps: the scheduler's length, counted in `settings.interval`; None if it has none.
    run_steps: the run's length, counted in the same way; None if unknown.
    own: the scheduler's own frequency and strictness, if it came with them.
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
        self._frequency, self._is_strict = (1, True) if own is None else (own.frequency, own.strict)
        self._calls = 0  # counted only if `frequency` isn't 1
        self._steps_after = "validation" if isinstance(scheduler, ReduceLROnPlateau) else settings.interval

    def step_after(self, what: str, metrics: Mapping[str, float] | None = None) -> None:
        """Step the scheduler if it is due after a `step`, an `epoch` or, with its metrics, a `validation`."""
        if self._scheduler is None or self._steps_after != what:
            return
        if self._frequency > 1:
            self._calls += 1
            if self._calls % self._frequency:
                return
        if metrics is None:
            self._scheduler.step()
        elif (monitor := str(self._settings.monitor)) in metrics:
            self._scheduler.step(metrics[monitor])
        elif self._is_strict:
            raise ConfigError(
                f"The learning-rate schedule monitors {monitor}, which validation doesn't compute: it computes "
                f"{', '.join(metrics)}.{did_you_mean(nearest(monitor, metrics))}"
            )

    def state_dict(self) -> dict[str, Any]:
        if self._scheduler is None:
            return {}
        calls = {_CALLS: self._calls} if self._frequency > 1 else {}
        lengths = {_LENGTH: self._total_steps, _RUN_LENGTH: self._run_steps}
        return {**self._scheduler.state_dict(), **lengths, **calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned, after the optimizer's state.

        Raises:
            ConfigError: if the state is of a schedule of another length, unless `settings.total_steps` is set and the
                schedule can be stretched; and if the schedule is over, unless the run was planned to be longer.
        """
        if self._scheduler is None:
            return
        state = dict(state)
        made_for, self._calls = state.pop(_LENGTH, None), state.pop(_CALLS, 0)
        planned_steps = state.pop(_RUN_LENGTH, None)
        self._check_end(_position(state), planned_steps=planned_steps)
        if self._total_steps is None or made_for in (None, self._total_steps):
            self._scheduler.load_state_dict(state)
            return
        can_stretch = isinstance(self._scheduler, LambdaLR)
        if not can_stretch or self._settings.total_steps is None:
            interval, position = self._settings.interval, _position(state)
            choices = []
            if position is None or position < made_for:
                choice = f"scheduler.total_steps={made_for} keeps the schedule as it was"
                if self._run_steps is not None and self._run_steps > made_for:
                    choice += f"; the last {self._run_steps - made_for} {interval}s have its last learning rate"
                choices.append(f"{choice}.")
            if can_stretch:
                choices.append(f"scheduler.total_steps={self._total_steps} stretches it.")
            choices.append(_AS_IT_WAS)
            choices.append(_NEW_RUN)
            raise ConfigError(
                f"The learning-rate schedule was made for {made_for} {interval}s, and this run has "
                f"{self._total_steps}. To resume, choose:\n" + "\n".join(f"  - {choice}" for choice in choices)
            )
        interval = self._settings.interval
        logger.info("the schedule is stretched from %d to %d %ss", made_for, self._total_steps, interval)
        # The position and the base rates are those of the state; callables keep this run's length.
        self._scheduler.load_state_dict({**state, "lr_lambdas": [None] * len(state["base_lrs"])})
        for group, base, factor in zip(
            self._scheduler.optimizer.param_groups, state["base_lrs"], self._scheduler.lr_lambdas, strict=True
        ):
            group["lr"] = base * factor(state["last_epoch"])

    def _check_end(self, position: int | None, *, planned_steps: int | None) -> None:
        """Raise ConfigError if the schedule is over at `position` and the run isn't, unless that was planned.

        planned_steps: the run's length when the state was saved; None in earlier checkpoints.
        """
        length, steps, interval = self._total_steps, self._run_steps, self._settings.interval
        if length is None or steps is None or position is None or position >= steps:
            return
        was_planned = planned_steps is not None and planned_steps > length
        if planned_steps is None and self._settings.total_steps is not None:
            was_planned = True
        if position >= length and not was_planned:
            choices = [_AS_IT_WAS, _NEW_RUN]
            if isinstance(self._scheduler, LambdaLR):
                choices.insert(0, f"scheduler.total_steps={steps} stretches it.")
            raise ConfigError(
                f"The learning-rate schedule is over: it has {length} {interval}s, and this run continues after "
                f"{position} of them to {steps}, with the schedule's last learning rate. To resume, choose:\n"
                + "\n".join(f"  - {choice}" for choice in choices)
            )
        if position < length < steps and not was_planned:
            warn(
                f"The learning-rate schedule ends after {length} {interval}s, and the run after {steps}: the last "
                f"{steps - length} have the schedule's last learning rate"
            )

    def change_settings(self, optimizer: Optimizer, changes: Mapping[int, Mapping[str, Change]], *, key: str) -> None:
        """Give the optimizer settings that have changed since the checkpoint; learning rates follow the schedule.

        Later rates are exactly those of a schedule that had the new settings from its first step. Call it once all
        states are loaded.

        Args:
            changes: Number of the group → name → its values before and now.
            key: Of the optimizer, for messages.

        Raises:
            ConfigError: for a setting that the schedule sets itself, and for a schedule whose rates with other settings
                aren't known.
        """
        groups = optimizer.param_groups
        if self._scheduler is None:
            for number, group_changes in changes.items():
                for name, change in group_changes.items():
                    groups[number][name] = change.scaled(groups[number].get(name)) if name == "lr" else change.now
            return
        before = self._replay(changes, "before")
        now = self._replay(changes, "now")
        position = _position(self._scheduler.state_dict())
        if isinstance(self._scheduler, ReduceLROnPlateau):
            position = self._reductions(changes, optimizer, key=key)
        if position is None:
            raise ConfigError(
                f"resume can't change {key}: {type(self._scheduler).__name__} doesn't say how often it has moved.\n"
                "Keep the settings as they were, or start a new run from these weights with init_from."
            )
        before.step(position)
        now.step(position)
        self._check_replayed(before, optimizer, key=key)
        for number, group_changes in changes.items():
            for name in group_changes:
                groups[number][name] = now.groups[number][name]
            if "initial_lr" in now.groups[number]:
                groups[number]["initial_lr"] = now.groups[number]["initial_lr"]
        if not isinstance(self._scheduler, ReduceLROnPlateau):  # whose state is of metrics
            self._scheduler.load_state_dict(now.scheduler.state_dict())
        for number, group_changes in changes.items():
            for name, change in group_changes.items():
                self._check_effect(name, change, before, now, number=number, key=key)

    def _replay(self, changes: Mapping[int, Mapping[str, Change]], which: Literal["before", "now"]) -> _Replay:
        """Return the schedule at its first step, with the settings as they were `before` or are `now`."""
        assert self._rebuild is not None
        groups = [dict(group) for group in self._rebuild.groups]
        for number, group_changes in changes.items():
            for name, change in group_changes.items():
                groups[number][name] = getattr(change, which)
        return _Replay(self._rebuild, groups)

    def _reductions(self, changes: Mapping[int, Mapping[str, Change]], optimizer: Optimizer, *, key: str) -> int:
        """Return how often ReduceLROnPlateau has reduced the rates. Raises ConfigError if that can't be known."""
        replay = self._replay(changes, "before")
        wanted = [group["lr"] for group in optimizer.param_groups]
        number = 0
        while True:
            rates = [group["lr"] for group in replay.groups]
            replay.step(1)
            is_reduced = rates != [group["lr"] for group in replay.groups]
            is_found = all(math.isclose(rate, own, rel_tol=1e-6) for rate, own in zip(rates, wanted, strict=True))
            if is_found and not is_reduced:
                raise ConfigError(
                    f"resume can't change {key}.lr: ReduceLROnPlateau has reached its min_lr, so how often it would "
                    "have reduced another learning rate isn't known.\n"
                    "Keep the learning rate, or start a new run from these weights with init_from."
                )
            if is_found or not is_reduced:  # if it isn't found, the rates differ from the checkpoint's
                return number
            number += 1

    def _check_replayed(self, before: _Replay, optimizer: Optimizer, *, key: str) -> None:
        """Raise ConfigError if replaying the schedule doesn't give the checkpoint's rates."""
        for group, replayed in zip(optimizer.param_groups, before.groups, strict=True):
            if not math.isclose(group["lr"], replayed["lr"], rel_tol=1e-6, abs_tol=1e-15):
                raise ConfigError(
                    f"resume can't change {key}.lr: the checkpoint's learning rate is {group['lr']:g}, where "
                    f"{type(self._scheduler).__name__} with the settings of that run gives {replayed['lr']:g}. "
                    "Something else sets it, such as a callback, or the schedule depends on more than the step.\n"
                    "Keep the settings as they were, or start a new run from these weights with init_from."
                )

    def _check_effect(self, name: str, change: Change, before: _Replay, now: _Replay, *, number: int, key: str) -> None:
        """Raise ConfigError if the schedule sets what has changed, so that the change would be lost."""
        if name == "lr":
            is_lost = before.groups[number]["lr"] == now.groups[number]["lr"]
            if is_lost:  # by chance, at the end of a decay: what follows decides
                before.step(1)
                now.step(1)
                is_lost = before.groups[number]["lr"] == now.groups[number]["lr"]
        else:
            is_lost = now.groups[number][name] != change.now
        if is_lost:
            raise ConfigError(
                f"{key}.{name}={change.now} has no effect: {type(self._scheduler).__name__} sets it from its own "
                f"arguments.\nresume can't change a schedule that has begun. Keep {key}.{name}={change.before}, or "
                "start a new run from these weights with init_from."
            )


class Change(NamedTuple):
    """The value of an optimizer's setting when the checkpoint was saved, and now. None: not set."""

    before: Any
    now: Any

    def scaled(self, present: Any) -> Any:
        """Return the new value, times the factor that something else, such as a callback, had applied to the old."""
        if not self.before or present is None or present == self.before:
            return self.now
        return present * (self.now / self.before)


@final
class Rebuild(NamedTuple):
    """Builds the scheduler again, for an optimizer with the groups from before the first one was built."""

    make: Callable[[Optimizer], Any]
    groups: Sequence[Mapping[str, Any]]
    defaults: Mapping[str, Any]

    @classmethod
    def of(cls, optimizer: Optimizer, make: Callable[[Optimizer], Any]) -> Rebuild:
        """Note the groups of an optimizer that has no scheduler yet."""
        groups = [
            {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
        ]
        return cls(make, groups, dict(optimizer.defaults))


class _Replay:
    """A second scheduler that starts from the first step, on an optimizer that trains nothing."""

    def __init__(self, rebuild: Rebuild, groups: Sequence[Mapping[str, Any]]) -> None:
        own = [{**group, "params": [nn.Parameter(torch.zeros(1))]} for group in groups]
        optimizer = Optimizer(own, dict(rebuild.defaults))
        scheduler = rebuild.make(optimizer)
        self.scheduler: Any = scheduler.scheduler if isinstance(scheduler, LRSchedulerConfig) else scheduler
        self.groups = optimizer.param_groups

    def step(self, number: int) -> None:
        """Step the scheduler, or reduce the rates as ReduceLROnPlateau does. About 10 µs a step."""
        if isinstance(self.scheduler, ReduceLROnPlateau):
            for _ in range(number):
                self._reduce()
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the optimizer makes no steps
            for _ in range(number):
                self.scheduler.step()

    def _reduce(self) -> None:
        for group, min_lr in zip(self.groups, self.scheduler.min_lrs, strict=True):
            reduced = max(group["lr"] * self.scheduler.factor, min_lr)
            if group["lr"] - reduced > self.scheduler.eps:
                group["lr"] = reduced


def _position(state: Mapping[str, Any]) -> int | None:
    """Return how many steps a scheduler with this state has made; None if it doesn't say."""
    if "last_epoch" in state:
        return int(state["last_epoch"])
    inside = state.get("_schedulers")  # a ChainedScheduler steps all together
    return _position(inside[0]) if inside else None


@final
class Schedules:
    """The schedules of several optimizers by name, as one."""

    def __init__(self, named: Mapping[str, Schedule]) -> None:
        self.named = dict(named)

    def step_after(self, what: str, metrics: Mapping[str, float] | None = None) -> None:
        for each in self.named.values():
            each.step_after(what, metrics)

    def state_dict(self) -> dict[str, Any]:
        return {name: each.state_dict() for name, each in self.named.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, each in self.named.items():
            each.load_state_dict(state[name])


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


def fused_pays(parameters: Sequence[Tensor]) -> bool:
    """Return True if torch's fused optimizers take these parameters and are faster.

    They pass over memory once instead of several times. On a CPU they are slower for few elements.
    """
    kinds = {each.device.type for each in parameters}
    can_fuse = all(each.is_floating_point() and not is_dtensor(each) for each in parameters)
    if not can_fuse or not kinds <= {"cpu", "cuda"}:
        return False
    return kinds == {"cuda"} or sum(each.numel() for each in parameters) >= _FUSED_PAYS_FROM


def skip_profiler_mark(optimizer: Optimizer) -> None:
    """Let `optimizer.step()` leave out torch's mark for the profiler while no profiler runs and no step hook is set.

    The mark takes 35 of the 280 µs of a toy step. An optimizer whose class isn't wrapped by torch in the known way
    stays as it is, and so does one with a scheduler already, which wraps `optimizer.step`.
    """
    marked, profiler = type(optimizer).step, torch.autograd.profiler
    is_known = getattr(marked, "__code__", None) is Optimizer.profile_hook_step(marked).__code__
    if "step" in vars(optimizer) or not is_known:
        return
    bare: Callable[..., Any] = vars(marked)["__wrapped__"]
    own_hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    hooks = *own_hooks, _global_optimizer_pre_hooks, _global_optimizer_post_hooks

    def step(self: Optimizer, *args: Any) -> Any:
        return (marked if profiler._is_profiler_enabled or any(hooks) else bare)(self, *args)

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]


@torch.no_grad()
def restore_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load a state dict, but keep this optimizer's choice of `fused` and `foreach` and the parameters' memory layout.

    The run that saved it may have had another device, memory format or a sharded model.
    """
    groups = [
        {**saved, **{name: own[name] for name in ("fused", "foreach") if name in saved and name in own}}
        for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=True)
    ]
    optimizer.load_state_dict({**state, "param_groups": groups})
    for parameter, kept in optimizer.state.items():
        for name, value in kept.items():
            if not isinstance(value, Tensor) or is_dtensor(value) or value.shape != parameter.shape:
                continue
            if value.stride() != parameter.stride():  # fused kernels walk both in memory order
                kept[name] = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def clip_gradients(
    parameters: Sequence[Tensor], settings: TrainerConfig, *, total_norm: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """Clip the gradients in place as the settings say, and return their 2-norm before; doesn't wait for the device.

    They must be unscaled and synchronised. If they are sharded, every rank must call it.

    Args:
        total_norm: `Strategy.total_norm`: returns the norm over all ranks, given that of this rank's gradients.

    Returns:
        The norm, on the first gradient's device; None if elements are clipped.
    """
    value = settings.gradient_clip_val
    if value is not None and settings.gradient_clip_algorithm == "value":
        for group in by_mesh(parameters):
            nn.utils.clip_grad_value_(group, value)
        return None
    with torch.no_grad():
        norm = total_norm(norm_of([each.grad for each in parameters if each.grad is not None]))
    if value is not None:
        for group in by_mesh(parameters):
            nn.utils.clip_grads_with_norm_(group, value, norm)
    return norm
