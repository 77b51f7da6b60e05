"""Moving a batch to the device that computes on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from framework.types import Batch

_WITHOUT_PINNED_MEMORY = {"cpu", "mps", "meta"}


def pins_memory(device: torch.device) -> bool:
    """Whether copies to `device` gain from page-locked memory: they then run beside the computation."""
    return device.type not in _WITHOUT_PINNED_MEMORY


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on `device`: in lists, tuples, named tuples and mappings at any depth.

    Mappings become dicts; what is no tensor stays as it is. For devices that gain from it the tensors pass through
    pinned memory and the copy doesn't wait.
    """
    return _move(batch, device, pins=pins_memory(device))


def _move(batch: Any, device: torch.device, *, pins: bool) -> Any:
    if isinstance(batch, Tensor):
        if pins and batch.device.type == "cpu":
            return batch.pin_memory().to(device, non_blocking=True)
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: _move(value, device, pins=pins) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_move(value, device, pins=pins) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(_move(value, device, pins=pins) for value in batch)
    return batch
