"""Weights into a model, with an error that says how the two differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from framework.distributed.tensors import spread_like
from framework.errors import CheckpointError

_SHOWN = 4
_WRAPPER_PREFIXES = ("module.", "_orig_mod.")


def load_weights(model: nn.Module, state_dict: Mapping[str, Any], *, source: object) -> None:
    """Copy every tensor of `state_dict` into `model` (unwrapped), onto the devices its parameters are on.

    Where the model is spread over ranks, each takes its part of what it was given.
    source: where the weights come from, for the message. Raises CheckpointError where names or shapes differ; the
    model is partly changed then.
    """
    own = model.state_dict()
    try:
        model.load_state_dict(_spread_as(own, state_dict), strict=True)
    except RuntimeError as error:
        raise _misfit(model, _differences(own, state_dict) or [str(error)], source=source) from error


def check_fits(model: nn.Module, state_dict: Mapping[str, Any], *, source: object) -> None:
    """Raise CheckpointError where names or shapes differ from the model's, before anything of it is changed."""
    if differences := _differences(model.state_dict(), state_dict):
        raise _misfit(model, differences, source=source)


def _spread_as(own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Each tensor as the model has it; all of it where shapes differ, which is told by who loads it."""
    return {
        name: spread_like(own[name], value) if name in own and _shape(own[name]) == _shape(value) else value
        for name, value in given.items()
    }


def _misfit(model: nn.Module, differences: Iterable[str], *, source: object) -> CheckpointError:
    return CheckpointError(
        f"The weights in {source} don't fit the model {type(model).__name__}.\n"
        + "\n".join(differences)
        + "\nChoose the model they were trained with, or a checkpoint of this model."
    )


def _differences(own: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    shapes = [
        f"{name}: the model has {_shape(own[name])}, the checkpoint {_shape(given[name])}"
        for name in own
        if name in given and _shape(own[name]) != _shape(given[name])
    ]
    missing = [name for name in own if name not in given]
    unexpected = [name for name in given if name not in own]
    lines = [f"  {line}" for line in shapes[:_SHOWN]]
    if len(shapes) > _SHOWN:
        lines.append(f"  … and {len(shapes) - _SHOWN} more with other shapes")
    lines += [f"  not in the checkpoint: {_first(missing)}"] if missing else []
    lines += [f"  not in the model: {_first(unexpected)}"] if unexpected else []
    for prefix in _WRAPPER_PREFIXES:
        if missing and {name.removeprefix(prefix) for name in given} == set(own):
            lines.append(f"  The names fit without the prefix {prefix!r}: save the unwrapped model's state dict.")
    return lines


def _first(names: Iterable[str]) -> str:
    names = list(names)
    more = f" … and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _shape(value: Any) -> Any:
    return list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
