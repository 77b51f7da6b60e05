"""The check that a state holds only what `torch.load(weights_only=True)` reads back."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from framework.errors import CheckpointError

_VALUES = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray, torch.Tensor, torch.nn.Parameter})
_VALUES_OF_TORCH = frozenset({torch.Size, torch.device, torch.dtype})
_INT_BITS = 8 * 255 - 1  # what the unpickler of weights_only reads
_MAPPINGS = frozenset({dict, OrderedDict, Counter})
_SEQUENCES = frozenset({list, tuple, set})


def check_plain(state: Any, *, name: str = "") -> None:
    """Raise CheckpointError, naming the entry's path, where `state` holds an object that could not be read back.

    Types are compared exactly: a subclass would come back as something else, or not at all.
    """
    kind = type(state)
    if kind is int and state.bit_length() > _INT_BITS:
        raise CheckpointError(
            f"The state to save has at {name or 'its top'} a whole number of {state.bit_length()} bits, which a "
            f"checkpoint can't hold: it may have {_INT_BITS}.\nGive it as text: str(number)."
        )
    if kind in _VALUES or kind in _VALUES_OF_TORCH:
        return
    if kind in _MAPPINGS:
        _check_mapping(state, name=name)
    elif kind in _SEQUENCES:
        for index, value in enumerate(state):
            if kind is set:
                _check_hashed(value, name=f"{name}[{index}]")
            check_plain(value, name=f"{name}[{index}]")
    else:
        raise CheckpointError(
            f"The state to save has at {name or 'its top'} a {kind.__module__}.{kind.__qualname__}, which a checkpoint "
            f"can't hold.\nIt may hold tensors, numbers, strings, bytes, None, and dicts, lists, tuples and sets of "
            f"them.\n{_advice(state)}"
        )


def _check_mapping(state: Mapping[Any, Any], *, name: str) -> None:
    for key, value in state.items():
        below = f"{name}.{key}".lstrip(".") if isinstance(key, str) else f"{name}[{key!r}]"
        _check_hashed(key, name=f"the key {below}")
        check_plain(key, name=f"the key {below}")
        check_plain(value, name=below)


def _check_hashed(value: Any, *, name: str) -> None:
    """A set's entries and a mapping's keys are found by hash, and a tensor's is another one when it is read back."""
    if isinstance(value, torch.Tensor) or (isinstance(value, tuple) and any(map(_is_tensor, value))):
        raise CheckpointError(
            f"The state to save has at {name} a tensor, which nothing would find there once it is read back.\n"
            "Keep tensors in lists, tuples, or as the values of dicts."
        )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _advice(value: Any) -> str:
    kind = type(value)
    if kind.__module__.partition(".")[0] == "numpy":
        return "Give a NumPy number's .item(), and of an array torch.from_numpy(array) or .tolist()."
    if isinstance(value, torch.Tensor):
        return "Give a plain tensor: tensor.as_subclass(torch.Tensor)."
    if callable(getattr(value, "state_dict", None)):
        return "Give its state_dict() instead, and load that in load_state_dict."
    if isinstance(value, Path):
        return "Give str(path)."
    if isinstance(value, (dict, list, tuple, set)):
        plain = next(base.__name__ for base in kind.__mro__ if base in _MAPPINGS | _SEQUENCES)
        return f"Give {plain}(...) of it."
    return "Give the plain values it is made of, and build it again in load_state_dict."
