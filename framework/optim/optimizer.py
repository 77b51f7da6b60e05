"""One optimizer: its fused form, the cost of its step, and its state from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from inspect import signature
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from framework.distributed.sharded import is_dtensor

# On a CPU, the number of elements in all parameters from which on fused optimizers are faster.
_FUSED_PAYS_FROM = 100_000
# The attribute of an optimizer that a task steps with a closure.
_GETS_CLOSURE = "_framework_gets_closure"


def give_closure(optimizer: Optimizer) -> None:
    """Note that the task steps the optimizer with a closure, as LBFGS needs it: the trainer can't."""
    setattr(optimizer, _GETS_CLOSURE, True)


def gets_closure(optimizer: Optimizer) -> bool:
    return bool(vars(optimizer).get(_GETS_CLOSURE))


class Closure(Enum):
    """If the step of an optimizer takes a closure that computes loss and gradients."""

    NONE = auto()
    # The step begins by calling it, as that of LBFGS does.
    CALLED_FIRST = auto()
    # The step begins with gradients that are there, and calls it for others, as that of SAM does.
    AFTER_GRADIENTS = auto()


def closure_of(optimizer: Optimizer, *, begins_with_gradients: bool) -> Closure:
    """Return what an optimizer asks of the trainer. begins_with_gradients: what its configuration says."""
    if begins_with_gradients:
        return Closure.AFTER_GRADIENTS
    # Not that of the object, which `skip_profiler_mark` may have replaced.
    parameter = signature(type(optimizer).step).parameters.get("closure")
    is_required = parameter is not None and parameter.default is parameter.empty
    if is_required and not gets_closure(optimizer):
        return Closure.CALLED_FIRST
    return Closure.NONE


def fused_pays(parameters: Sequence[Tensor]) -> bool:
    """Return True if torch's fused optimizers take these parameters and are faster.

    They pass over memory once instead of several times. On a CPU they are slower for few elements.
    """
    can_fuse = all(parameter.is_floating_point() and not is_dtensor(parameter) for parameter in parameters)
    if not can_fuse:
        return False
    device_types = {parameter.device.type for parameter in parameters}
    if device_types == {"cuda"}:
        return True
    if not device_types <= {"cpu", "cuda"}:
        return False
    return sum(parameter.numel() for parameter in parameters) >= _FUSED_PAYS_FROM


def skip_profiler_mark(optimizer: Optimizer) -> None:
    """Let `optimizer.step()` leave out torch's mark for the profiler while no profiler runs and no step hook is set.

    The mark takes 35 of the 280 µs of a toy step. An optimizer whose class isn't wrapped by torch in the known way
    stays as it is, and so does one with a scheduler already, which wraps `optimizer.step`.
    """
    marked_step = type(optimizer).step
    is_known = getattr(marked_step, "__code__", None) is Optimizer.profile_hook_step(marked_step).__code__
    if "step" in vars(optimizer) or not is_known:
        return

    bare_step: Callable[..., Any] = vars(marked_step)["__wrapped__"]
    profiler = torch.autograd.profiler
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )

    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if profiler._is_profiler_enabled or any(hooks):
            return marked_step(self, *args, **kwargs)
        return bare_step(self, *args, **kwargs)

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]


def has_evaluation_mode(optimizer: Optimizer) -> bool:
    """Return True for schedule-free optimizers, which have `train` and `eval` (https://arxiv.org/abs/2405.15682)."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


@contextmanager
def weights_to_evaluate(optimizer: Any, _: nn.Module) -> Iterator[None]:
    """While entered, the parameters are those that the optimizer evaluates; afterwards exactly those of before.

    The optimizer's own way back, `train`, computes them, with an error of rounding that would depend on how often a run
    is evaluated and saved. So they are copied.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    copies = [parameter.detach().clone() for parameter in parameters]
    optimizer.eval()
    try:
        yield
    finally:
        optimizer.train()
        with torch.no_grad():
            for parameter, copy in zip(parameters, copies, strict=True):
                parameter.copy_(copy)


@torch.no_grad()
def restore_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load a state dict, but keep this optimizer's choice of `fused` and `foreach` and the parameters' memory layout.

    The run that saved it may have had another device, memory format or a sharded model.
    """
    groups = []
    for saved_group, present_group in zip(state["param_groups"], optimizer.param_groups, strict=True):
        group = dict(saved_group)
        for name in ("fused", "foreach"):
            if name in saved_group and name in present_group:
                group[name] = present_group[name]
        groups.append(group)
    optimizer.load_state_dict({**state, "param_groups": groups})

    for parameter, tensors in optimizer.state.items():
        for name, value in tensors.items():
            if not isinstance(value, Tensor) or is_dtensor(value) or value.shape != parameter.shape:
                continue
            # Fused kernels walk parameter and state in memory order, so both need the same layout.
            if value.stride() != parameter.stride():
                as_parameter = torch.empty_like(parameter, dtype=value.dtype, device=value.device)
                tensors[name] = as_parameter.copy_(value)
