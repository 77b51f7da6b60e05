"""Walk and copy batches: tensors in lists, tuples, mappings, dataclasses and attrs classes, at any depth."""

from __future__ import annotations

import copy
from collections import UserDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from framework.types import Batch

_COLLECTIONS = (list, tuple, deque)
_NO_PARTS = ("__dict__", "__weakref__")
_WITHOUT_TENSORS = (str, bytes, int, float, type, FunctionType, ModuleType)


def with_parts(batch: Batch, change: Callable[[Any], Any]) -> Batch:
    """Return a copy of a collection or record with `change` applied to each part; return anything else unchanged.

    The copy is of the same type, except that mappings other than dicts and UserDicts become dicts. Records are
    dataclasses and attrs classes, frozen ones too: all their attributes are parts. They are copied without `__init__`.
    If no part of a record changes, the record itself is returned.
    """
    if isinstance(batch, Mapping):
        return _mapping_with_parts(batch, change)
    if isinstance(batch, deque):
        return deque(map(change, batch), maxlen=batch.maxlen)
    if isinstance(batch, (list, tuple)):
        parts = [change(part) for part in batch]
        is_named_tuple = hasattr(batch, "_fields")
        return type(batch)(*parts) if is_named_tuple else type(batch)(parts)
    if not isinstance(batch, type) and (is_dataclass(batch) or hasattr(batch, "__attrs_attrs__")):
        return _record_with_parts(batch, change)
    return batch


def map_tensors(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """Return a copy of the batch with `change` applied to each tensor in collections and records; see `with_parts`."""
    if isinstance(batch, Tensor):
        return change(batch)
    return with_parts(batch, lambda part: map_tensors(part, change))


def held_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors that a value holds, in the attributes of any object too.

    For a tensor that is composed of others, such as a sparse one, its components are yielded.
    """
    for part in _walk(value, set()):
        if isinstance(part, Tensor):
            yield from _dense_tensors(part)


def record_stream(batch: Batch, stream: torch.Stream, device: torch.device) -> None:
    """Keep the batch's memory on `device` from being reused before `stream` has finished its current work.

    An object's own `record_stream` is called too, for memory that isn't visible from Python.
    """
    for part in _walk(batch, set()):
        if isinstance(part, Tensor):
            for tensor in _dense_tensors(part):
                if tensor.device == device:
                    tensor.record_stream(stream)
        elif callable(getattr(part, "record_stream", None)):
            part.record_stream(torch.get_device_module(device).current_stream(device))


def _walk(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the value and what it holds: in collections, and in attributes. Doesn't descend into tensors."""
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, _WITHOUT_TENSORS) or id(value) in seen:
        return
    seen.add(id(value))
    yield value
    parts: list[Any] = []
    if isinstance(value, Mapping):
        parts += value.values()
    elif isinstance(value, _COLLECTIONS):
        parts += value
    if type(value) not in (dict, list, tuple):
        parts += _attributes(value).values()
    for part in parts:
        yield from _walk(part, seen)


def _mapping_with_parts(batch: Mapping[Any, Any], change: Callable[[Any], Any]) -> Batch:
    parts = {key: change(part) for key, part in batch.items()}
    if type(batch) is dict or not isinstance(batch, (dict, UserDict)):
        return parts
    try:
        mapping = copy.copy(batch)
        for key, part in parts.items():
            mapping[key] = part
    except TypeError:
        # It is of a subclass that forbids changes.
        return parts
    return mapping


def _record_with_parts(batch: Any, change: Callable[[Any], Any]) -> Any:
    attributes = _attributes(batch)
    parts = {name: change(value) for name, value in attributes.items()}
    if all(parts[name] is value for name, value in attributes.items()):
        return batch
    kind: Any = type(batch)
    record = kind.__new__(kind)
    for name, part in parts.items():
        object.__setattr__(record, name, part)
    return record


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of the object itself, in its `__dict__` and its slots."""
    attributes = dict(getattr(value, "__dict__", {}))
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            if name not in _NO_PARTS and hasattr(value, name):
                attributes[name] = getattr(value, name)
    return attributes


def _dense_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensor, or the dense tensors that it is composed of."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _dense_tensors(getattr(tensor, name))
    elif tensor.layout is torch.sparse_coo:
        yield tensor._indices()
        yield tensor._values()
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    elif tensor.is_nested:
        yield tensor.values()
    else:
        yield tensor
