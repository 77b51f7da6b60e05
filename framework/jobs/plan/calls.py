"""Calls of operators as the trace saw them, which can be made again with other tensors to see how long they take."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

# What is written between two calls of operators with large tensors: in a step, others have used the caches meanwhile.
_CACHE_BYTES = 8 << 20
_LARGE_BYTES = 1 << 18
# Calls that take longer are made less often.
_REPETITIONS = ((0.2, 1), (0.01, 3), (0.0005, 7), (0.0, 15))


class _TensorSpec(NamedTuple):
    """What decides how long an operator takes with a tensor: anything but its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class _ListSpec(NamedTuple):
    items: tuple[Any, ...]


@dataclass(frozen=True)
class Call:
    """An operator and its arguments, without the values of tensors. Equal calls take the same time."""

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

    def measure(self) -> float:
        """Return how many seconds a call takes on the CPU. Raises whatever the operator does without its real values.

        Integers are zeros, and floating-point numbers are random.
        """
        args, kwargs = self.arguments()
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_large = sum(tensor.nbytes for tensor in tensors) >= _LARGE_BYTES
        cache = torch.zeros(_CACHE_BYTES, dtype=torch.uint8)
        with torch.no_grad():
            first_s = _seconds(self.operator, args, kwargs)
            repetitions = next(number for least_s, number in _REPETITIONS if first_s >= least_s)
            times_s = []
            for _ in range(repetitions):
                if is_large:
                    cache.add_(1)
                times_s.append(_seconds(self.operator, args, kwargs))
        return median(times_s)


def measured(calls: Iterable[Call]) -> dict[Call, float]:
    """Return how long each distinct call takes here, in seconds; those that can't be made are left out."""
    seconds = {}
    for call in dict.fromkeys(calls):
        try:
            seconds[call] = call.measure()
        except Exception:
            # An operator of the user may raise anything for zeros. The caller says how many are missing.
            continue
    return seconds


def _seconds(operator: Any, args: Any, kwargs: Mapping[str, Any]) -> float:
    begin_s = time.perf_counter()
    operator(*args, **kwargs)
    return time.perf_counter() - begin_s


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
