"""Build the model and the task."""

from __future__ import annotations

from collections.abc import Iterable
from inspect import signature
from typing import Any

from torch import device, nn
from torch.nn.parameter import is_lazy

from framework.config.schema import Node
from framework.config.targets import check_devices, takes, without_freeze
from framework.distributed.context import Context
from framework.engine.builders.objects import build_object, wrong_result
from framework.errors import TargetError
from framework.optim.objectives import has_objectives
from framework.strategies.parameters import chosen
from framework.types import Task


def build_model(node: Node, *, context: Context, num_stages: int | None = None) -> nn.Module:
    """Return the model on its device. One that takes `devices` gets all of the context's and places itself.

    Args:
        num_stages: set by a strategy that cuts the model into stages. The model then stays on the CPU, and `devices` is
            the CPU, repeated that many times.

    Raises:
        TopologyError: there are several devices, and the model takes none.
    """
    takes_devices = takes(node, "devices")
    check_devices(node, len(context.devices))
    node, patterns = without_freeze(node)
    devices = context.devices
    if num_stages is not None:
        devices = (_device_of_stages(context),) * num_stages
    model = build_object("model", node, devices=devices)
    if not isinstance(model, nn.Module):
        raise wrong_result("model", node, model, expected="a torch.nn.Module")
    _check_sizes_are_known(model)

    if patterns:
        for parameter in chosen(model, patterns, key="model.freeze"):
            parameter.requires_grad_(False)
    if takes_devices or num_stages is not None:
        return model
    return model.to(context.device)


def _check_sizes_are_known(model: nn.Module) -> None:
    """Raise TargetError for nn.LazyLinear and the like: optimizer, other processes and checkpoints need the sizes."""
    lazy = [(name, module) for name, module in model.named_modules() if _is_uninitialized(module)]
    if not lazy:
        return
    names = ", ".join(f"{name} ({type(module).__name__})" for name, module in lazy)
    raise TargetError(
        f"model: {type(model).__name__} has modules whose sizes aren't known before its first batch: {names}. The "
        "optimizer, the other processes and checkpoints need them.\n"
        "Write the sizes, as in nn.Linear(in_features, out_features), or end the model's __init__ with a first batch:\n"
        "    with torch.no_grad():\n"
        "        self(torch.zeros(2, ...))  # the shape of two samples"
    )


def _is_uninitialized(module: nn.Module) -> bool:
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return any(is_lazy(tensor) for tensor in tensors)


def _device_of_stages(context: Context) -> device:
    """Return where a model is built that will be cut into stages: on the CPU, or without values for job=plan."""
    if context.device.type == "meta":
        return context.device
    return device("cpu")


def build_task(node: Node, **offered: Any) -> Task:
    """Return the task, on the CPU.

    Args:
        offered: `model` (not wrapped yet), `config` and `context`, for a constructor that takes them.
    """
    task = build_object("task", node, **offered)
    # Each objective has a step of its own.
    if not has_objectives(task) and not callable(getattr(task, "training_step", None)):
        raise TargetError(
            f"task: {type(task).__name__} has no method training_step. Give it training_step(model, batch), which "
            "returns a framework.StepOutput, or an attribute `objectives`."
        )
    checked: Task = task
    return checked


def check_validation_step(task: Task, parts: Iterable[str]) -> None:
    """Raise TargetError if the task can't evaluate and there are parts to evaluate, such as `val` or `test/clean`."""
    parts = list(parts)
    if not parts:
        return
    step = getattr(task, "validation_step", None)
    if not callable(step):
        raise TargetError(
            f"task: {type(task).__name__} has no method validation_step, and there is data to evaluate: "
            f"{', '.join(parts)}. Give it validation_step(model, batch), which returns a framework.StepOutput, or "
            "leave out this part of framework.Datasets."
        )
    info = signature(step).parameters.get("info")
    if info is not None and info.default is info.empty:
        raise TargetError(
            f"task: validation_step of {type(task).__name__} needs `info`, which only training steps get: a validation "
            "batch belongs to one process, and isn't part of a global batch.\n"
            "Leave out the parameter, and what uses it: validation_step(model, batch)."
        )
