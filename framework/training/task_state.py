"""The state of a task that holds the model, or parameters that are trained with it: the model's part is saved once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from framework.types import Task


def without_model_state(state: Any, task: Task, model: nn.Module) -> Any:
    """Return the task's state without what the model's own state has."""
    shared = _shared_names(task, model)
    if not shared:
        return state
    return {name: value for name, value in state.items() if name not in shared}


def with_model_state(state: Any, task: Task, model: nn.Module) -> Any:
    """Return what the task's `load_state_dict` takes: a saved state, completed by the model's present weights."""
    if not isinstance(task, nn.Module):
        return state
    shared = _shared_names(task, model)
    present = task.state_dict()
    of_model = {name: present[name] for name in shared if name in present}
    return {**state, **of_model}


def _shared_names(task: Task, model: nn.Module) -> set[str]:
    """Return the task's names of parameters and buffers that are the model's, too."""
    if not isinstance(task, nn.Module):
        return set()
    of_model = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    named: Mapping[str, Any] = {
        **dict(task.named_parameters(remove_duplicate=False)),
        **dict(task.named_buffers(remove_duplicate=False)),
    }
    return {name for name, tensor in named.items() if id(tensor) in of_model}
