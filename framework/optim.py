"""Around the optimizer: when the learning rate moves, a schedule of our own, and gradients clipped and measured."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from framework.config.schema import ClipAlgorithm, Interval, TrainerConfig
from framework.distributed.tensors import is_spread, whole
from framework.errors import ConfigError
from framework.rank_log import logger

TotalNorm = Callable[[Tensor], Tensor]

_LENGTH = "schedule_total_steps"  # its key in `state_dict`, beside the scheduler's own
_FUSED_PAYS_FROM = 100_000  # numbers in all parameters, on a CPU


@final
class Schedule:
    """A scheduler (or none) with when it moves: the trainer calls every `after_` method, and one of them acts.

    ReduceLROnPlateau moves after validations, by the metric `monitor`; all others after steps or epochs.

    Args:
        total_steps: the length that the scheduler was given, counted in `interval`; None if it takes none.
        may_stretch: if True, `load_state_dict` accepts the state of a schedule of another length.

    Raises:
        ConfigError: if `monitor` is set for a scheduler that watches no metric, or missing for one that does.
    """

    def __init__(
        self,
        scheduler: LRScheduler | None,
        *,
        interval: Interval,
        monitor: str | None,
        total_steps: int | None = None,
        may_stretch: bool = False,
    ) -> None:
        self._plateau = scheduler if isinstance(scheduler, ReduceLROnPlateau) else None
        if self._plateau is not None and monitor is None:
            raise ConfigError("ReduceLROnPlateau watches a metric: set scheduler.monitor, such as val/loss.")
        if self._plateau is None and monitor is not None:
            raise ConfigError(
                f"scheduler.monitor={monitor} is read by ReduceLROnPlateau only. Set scheduler.monitor=null."
            )
        self._scheduler = scheduler
        self._monitor = monitor
        self._total_steps = total_steps
        self._may_stretch = may_stretch
        self._unit = "epochs" if interval is Interval.EPOCH else "steps"
        timed = None if self._plateau is not None else scheduler
        self._each_step = timed if interval is Interval.STEP else None
        self._each_epoch = timed if interval is Interval.EPOCH else None

    def after_step(self) -> None:
        if self._each_step is not None:
            self._each_step.step()

    def after_epoch(self) -> None:
        if self._each_epoch is not None:
            self._each_epoch.step()

    def after_validation(self, metrics: Mapping[str, float]) -> None:
        """Raises ConfigError when the metric to watch isn't among those computed."""
        if self._plateau is None or self._monitor is None:
            return
        if self._monitor not in metrics:
            raise ConfigError(
                f"scheduler.monitor={self._monitor} isn't a validation metric. Use one of {', '.join(sorted(metrics))}."
            )
        self._plateau.step(metrics[self._monitor])

    def state_dict(self) -> dict[str, Any]:
        if self._scheduler is None:
            return {}
        length = {} if self._total_steps is None else {_LENGTH: self._total_steps}
        return {**self._scheduler.state_dict(), **length}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned. The optimizer's own state must have been loaded before.

        Raises:
            ConfigError: if the state is of a schedule of another length, unless that may and can be stretched.
        """
        if self._scheduler is None:
            return
        state = dict(state)
        made_for = state.pop(_LENGTH, state.get("total_steps"))  # earlier versions saved only OneCycleLR's own
        if self._total_steps is None or made_for in (None, self._total_steps):
            self._scheduler.load_state_dict(state)
        elif isinstance(self._scheduler, LambdaLR):
            self._stretch(self._scheduler, state, made_for=made_for)
        else:
            raise ConfigError(self._other_length(made_for))

    def _stretch(self, scheduler: LambdaLR, state: dict[str, Any], *, made_for: int) -> None:
        """Take the position and the base rates from `state`, and the learning rate from the schedule of this length."""
        groups = scheduler.optimizer.param_groups
        factors = [factor(state["last_epoch"]) for factor in scheduler.lr_lambdas]
        rates = [base * factor for base, factor in zip(state["base_lrs"], factors, strict=True)]
        change = (
            f"at {self._unit.removesuffix('s')} {state['last_epoch']} the learning rate changes from "
            f"{float(groups[0]['lr']):.3g} to {rates[0]:.3g}"
        )
        if not self._may_stretch:
            raise ConfigError(self._other_length(made_for, stretched=change))
        logger.info("the schedule is stretched from %d to %d %s: %s", made_for, self._total_steps, self._unit, change)
        scheduler.load_state_dict({**state, "lr_lambdas": [None] * len(rates)})  # callables keep this run's length
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

    def _other_length(self, made_for: int, *, stretched: str | None = None) -> str:
        """Return the error message for a state of another length. stretched: what stretching changes, if possible."""
        ways = []
        ends_early = self._total_steps is not None and made_for < self._total_steps
        if not (ends_early and isinstance(self._scheduler, OneCycleLR)):  # which raises after its last step
            end = f", which ends after {made_for} {self._unit}" if ends_early else " as it was"
            ways.append(f"scheduler.total_steps={made_for} keeps the schedule{end}.")
        if stretched is not None:
            ways.append(f"scheduler.total_steps={self._total_steps} stretches it: {stretched}.")
        return "\n".join(
            [
                f"The learning-rate schedule was made for {made_for} {self._unit}, and this run has "
                f"{self._total_steps}. To resume, choose:",
                *(f"  - {way}" for way in ways),
                "  - trainer.max_epochs, trainer.max_steps and the batch size as they were.",
                "  - a new run from these weights, with init_from.",
            ]
        )

    def set_learning_rate(self, optimizer: Optimizer, value: float, *, before: float | None) -> None:
        """Let the schedule go on from another base learning rate: what it has made of the one before is kept in scale.

        before: the base until now. Where it is None or 0 nothing can be scaled, and every rate becomes `value`.
        """

        def changed(rate: Any) -> Any:
            return rate * (value / before) if before else value

        for group in optimizer.param_groups:
            group |= {name: changed(group[name]) for name in ("lr", "initial_lr") if name in group}
        if self._scheduler is not None and hasattr(self._scheduler, "base_lrs"):
            self._scheduler.base_lrs = [changed(rate) for rate in self._scheduler.base_lrs]


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


def fused_pays(parameters: Iterable[Tensor | dict[str, Any]]) -> bool:
    """Whether torch's fused optimizers take these parameters, or groups of them, and are the faster ones.

    One pass over the memory of all instead of several over each. On a CPU few small parameters cost more that way.
    """
    tensors = _ungrouped(parameters)
    kinds = {tensor.device.type for tensor in tensors}
    if not kinds <= {"cpu", "cuda"} or not all(t.is_floating_point() and not is_spread(t) for t in tensors):
        return False
    return kinds == {"cuda"} or sum(tensor.numel() for tensor in tensors) >= _FUSED_PAYS_FROM


def are_on_cpu(parameters: Iterable[Tensor | dict[str, Any]]) -> bool:
    """Whether all of these parameters, or groups of them, lie on the CPU."""
    return all(tensor.device.type == "cpu" for tensor in _ungrouped(parameters))


def _ungrouped(parameters: Iterable[Tensor | dict[str, Any]]) -> list[Tensor]:
    groups = (item["params"] if isinstance(item, dict) else [item] for item in parameters)
    return [tensor for group in groups for tensor in ([group] if isinstance(group, Tensor) else group)]


@torch.no_grad()
def lay_out_state(optimizer: Optimizer) -> None:
    """Lay what the optimizer keeps of each parameter out in memory as the parameter is.

    After a checkpoint was loaded that was made with another memory format: fused kernels walk the memory of both.
    """
    for parameter, kept in optimizer.state.items():
        for name, value in kept.items():
            if not isinstance(value, Tensor) or is_spread(value) or value.shape != parameter.shape:
                continue
            if value.stride() != parameter.stride():
                kept[name] = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def gradient_dropper(optimizer: Optimizer) -> Callable[[], None]:
    """What `optimizer.zero_grad()` does, without its marks for profiler and compiler: they cost more than the rest.

    A `zero_grad` that isn't torch's, of the class or put in place on the optimizer at any time, is called.
    """
    kind, mine, torchs = type(optimizer), vars(optimizer), Optimizer.zero_grad

    def drop() -> None:
        if kind.zero_grad is not torchs or "zero_grad" in mine:
            optimizer.zero_grad(set_to_none=True)
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    return drop


def stepper(optimizer: Optimizer) -> Callable[[], object]:
    """What `optimizer.step()` does, without a mark for the profiler and a look for hooks where there is neither.

    Those are a twentieth of a small step. Only for torch's own optimizers, and only while nobody has put another step
    in place, on the optimizer or its class. To be asked for after the first step, which schedules look for.
    """
    kind = type(optimizer)
    wrapped, own = kind.step, vars(optimizer).get("step")
    bare: Callable[[Optimizer], object] | None = getattr(wrapped, "__wrapped__", None)
    # Whoever wraps it with functools.wraps takes over its marks, but not its code.
    is_wrapped_by_torch = getattr(wrapped, "__code__", None) is Optimizer.profile_hook_step(kind.step).__code__
    # A schedule puts a step of its own in place, around the class's.
    is_free = own is None or (hasattr(own, "_wrapped_by_lr_sched") and getattr(own, "__wrapped__", None) is wrapped)
    hooks = vars(sys.modules[Optimizer.__module__])
    names = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    is_torchs = kind.__module__.startswith("torch.optim.") and is_wrapped_by_torch and is_free
    if bare is None or not is_torchs or not all(name in hooks for name in names):
        return lambda: optimizer.step()
    before_any, after_any = (hooks[name] for name in names)
    mine, profiler = vars(optimizer), torch.autograd.profiler

    def step() -> object:
        has_hooks = before_any or after_any or mine["_optimizer_step_pre_hooks"] or mine["_optimizer_step_post_hooks"]
        if has_hooks or profiler._is_profiler_enabled or kind.step is not wrapped or mine.get("step") is not own:
            return optimizer.step()
        return bare(optimizer)

    return step


def gradient_look(
    settings: TrainerConfig, *, total_norm: TotalNorm | None
) -> Callable[[Iterable[Tensor]], Tensor | None]:
    """What to do with the gradients of parameters before a step: `clip_gradients` where so set, or `gradient_norm`."""
    if settings.gradient_clip_val is None:
        return partial(gradient_norm, total_norm=total_norm)
    return partial(
        clip_gradients,
        value=settings.gradient_clip_val,
        algorithm=settings.gradient_clip_algorithm,
        total_norm=total_norm,
    )


def clip_gradients(
    parameters: Iterable[Tensor], *, value: float, algorithm: ClipAlgorithm, total_norm: TotalNorm | None = None
) -> Tensor | None:
    """Clip the gradients in place, without waiting for the device; they must be unscaled and synchronised.

    norm: scale all so that their total norm is at most `value`; gives the norm before, on the first one's device.
    value: cut each element to within ±`value`; gives None. Parameters may be on several devices, or spread over ranks,
    which all call it then. total_norm: see `gradient_norm`.
    """
    if algorithm is ClipAlgorithm.NORM:
        trained = list(parameters)
        total = gradient_norm(trained, total_norm=total_norm)
        nn.utils.clip_grads_with_norm_(trained, value, total)
        return total
    nn.utils.clip_grad_value_(parameters, value)
    return None


def gradient_norm(parameters: Iterable[Tensor], *, total_norm: TotalNorm | None = None) -> Tensor:
    """The 2-norm of all gradients together, on the first one's device; doesn't wait for it. 0 without gradients.

    Every rank must call it where they are spread over ranks. total_norm: makes of the norm of this rank's that of all
    ranks', where each has other parameters.
    """
    if total_norm is not None:
        return total_norm(gradient_norm(parameters))
    gradients = [gradient for p in parameters if (gradient := p.grad) is not None]
    if _are_alike(gradients):
        # What torch's function comes to then, without its sorting by device and type.
        total: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        return total
    with torch.no_grad():
        return whole(nn.utils.get_total_norm(gradients))


def _are_alike(gradients: Sequence[Tensor]) -> bool:
    """Whether there are any, all of them plain ones of one type on one device that have no graph."""
    if not gradients:
        return False
    device, dtype = gradients[0].device, gradients[0].dtype
    for each in gradients:
        if type(each) is not Tensor or each.dtype is not dtype or each.device != device or each.requires_grad:
            return False
    return True


def with_own_kernels(state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """A saved state dict with what this optimizer has chosen of `fused` and `foreach`.

    Which of them pays, and which there is, depends on what is trained here: of a model that is spread, or on another
    device, it may be another than where the state was saved.
    """
    groups = [
        {**saved, **{name: own[name] for name in ("fused", "foreach") if name in saved and name in own}}
        for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=False)
    ]
    return {**state, "param_groups": [*groups, *state["param_groups"][len(groups) :]]}
