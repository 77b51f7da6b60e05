"""What a task trains itself, such as learned loss weights or a critic, becomes a part of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from framework.distributed.context import Context
from framework.errors import ConfigError
from framework.types import Task

NAME = "task"
"""The model's child that holds what the task trains."""


class TaskParameters(nn.Module):
    """Holds what the task trains; never called."""


def add_task_parameters(model: nn.Module, task: Task, *, context: Context) -> bool:
    """Register the task's parameters and modules that require gradients as the model's child `task`.

    Then they are wrapped, optimized and saved with the model, under names such as `task.head.weight`. The task's
    attributes stay the same objects. Modules that are frozen, as a teacher, stay with the task, and a task may have the
    model, or parts of it, as attributes.

    Returns:
        True if there are any.

    Raises:
        ConfigError: they can't be registered, or a tensor requires gradients that isn't a parameter.
    """
    is_spread = len(context.devices) > 1
    if is_spread and isinstance(task, nn.Module) and any(module is model for module in task.modules()):
        raise ConfigError(
            f"task: {type(task).__name__} is an nn.Module that contains the model, so it would move the model to one "
            f"device, and it has {len(context.devices)}. Use the argument `model` of its methods instead."
        )
    of_model = set(model.parameters())
    trained = TaskParameters()
    for name, value in _attributes(task).items():
        if isinstance(value, nn.Parameter):
            if value.requires_grad and value not in of_model:
                trained.register_parameter(name, value)
        elif isinstance(value, nn.Module):
            if _trains_others(value, of_model):
                _check_module(value, name, model=model, task=task)
                trained.add_module(name, value)
        else:
            _check_other_value(value, name, of_model, task=task)

    if next(trained.parameters(), None) is None:
        return False
    if hasattr(model, NAME):
        raise ConfigError(
            f"task: {type(task).__name__} has parameters that require gradients ({_names(trained)}), which are added "
            f"to the model as its attribute `{NAME}`, and {type(model).__name__} has one of that name. Rename it."
        )
    model.add_module(NAME, trained.to(context.device))
    return True


def _attributes(task: Task) -> Mapping[str, Any]:
    attributes = getattr(task, "__dict__", {})
    if isinstance(task, nn.Module):
        return {**attributes, **task._parameters, **task._modules}
    return attributes


def _trains_others(module: nn.Module, of_model: set[nn.Parameter]) -> bool:
    """Return True if the module has parameters to train that aren't the model's."""
    return any(parameter.requires_grad and parameter not in of_model for parameter in module.parameters())


def _check_module(module: nn.Module, name: str, *, model: nn.Module, task: Task) -> None:
    """Raise ConfigError if the module contains the model, which can't be a part of its own part."""
    if any(inner is model for inner in module.modules()):
        raise ConfigError(
            f"task: {type(task).__name__}.{name} has parameters that require gradients and contains the model. Make "
            "the model, and what is trained beside it, attributes of the task itself."
        )


def _check_other_value(value: Any, name: str, of_model: set[nn.Parameter], *, task: Task) -> None:
    """Raise ConfigError for what the value contains and no optimizer would train."""
    if isinstance(task, nn.Module) and name in ("_parameters", "_modules", "_buffers"):
        return
    for leaf in tree_leaves(value):
        if isinstance(leaf, nn.Module) and _trains_others(leaf, of_model):
            raise ConfigError(
                f"task: {type(task).__name__}.{name} contains a {type(leaf).__name__} with parameters that require "
                f"gradients ({_names(leaf)}).\nUse nn.ModuleList or nn.ModuleDict in place of a list or dict; or "
                "freeze them with requires_grad_(False)."
            )
        if isinstance(leaf, Tensor) and leaf.requires_grad and leaf not in of_model:
            raise ConfigError(
                f"task: {type(task).__name__}.{name} has a tensor that requires gradients and isn't trained.\n"
                "Make it an nn.Parameter, an attribute of the task; or detach it."
            )


def _names(module: nn.Module) -> str:
    names: Iterator[str] = (name for name, parameter in module.named_parameters() if parameter.requires_grad)
    return ", ".join(names)
