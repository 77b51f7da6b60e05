"""Calls of operators as the trace saw them, which can be made again with other tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


class _TensorSpec(NamedTuple):
    """All of a tensor but its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class _ListSpec(NamedTuple):
    items: tuple[Any, ...]


@dataclass(frozen=True)
class Call:
    """An operator and its arguments, without the values of tensors."""

    operator: Any
    args: _ListSpec
    kwargs: tuple[tuple[str, Any], ...]

    @staticmethod
    def of(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        named = tuple((name, _spec(value)) for name, value in sorted(kwargs.items()))
        return Call(operator, _ListSpec(tuple(map(_spec, args))), named)

    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """Return arguments and keywords to make the call with."""
        return _made(self.args), {name: _made(value) for name, value in self.kwargs}

    @property
    def mixes_types(self) -> bool:
        """True if its tensors have several types."""
        specs = [*_tensor_specs(self.args)]
        for _, value in self.kwargs:
            specs += _tensor_specs(value)
        return len({spec.dtype for spec in specs}) > 1


def _spec(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _TensorSpec(tuple(value.shape), value.stride(), value.dtype)
    if isinstance(value, (list, tuple)):
        return _ListSpec(tuple(map(_spec, value)))
    if isinstance(value, torch.Generator):
        # Any other one takes the same time.
        return None
    return value


def _tensor_specs(spec: Any) -> list[_TensorSpec]:
    if isinstance(spec, _TensorSpec):
        return [spec]
    specs = []
    if isinstance(spec, _ListSpec):
        for item in spec.items:
            specs += _tensor_specs(item)
    return specs


def _made(spec: Any) -> Any:
    if isinstance(spec, _ListSpec):
        return [_made(item) for item in spec.items]
    if not isinstance(spec, _TensorSpec):
        return spec
    size = 0
    if 0 not in spec.shape:
        size = 1 + sum((length - 1) * stride for length, stride in zip(spec.shape, spec.stride, strict=True))
    if spec.dtype.is_floating_point:
        flat = torch.rand(size).to(spec.dtype)
    else:
        flat = torch.zeros(size, dtype=spec.dtype)
    return flat.as_strided(spec.shape, spec.stride)
