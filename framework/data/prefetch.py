"""Move batches to the device: the next one is copied on a side stream while the model computes with this one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from inspect import Parameter, signature
from typing import Any, final

import torch
from torch import Tensor

from framework.data.batch_tree import held_tensors, record_stream, with_parts
from framework.types import Batch

_WITHOUT_PINNED_MEMORY = {"cpu", "mps", "meta"}


def pins_memory(device: torch.device) -> bool:
    """Return True if copies to `device` from page-locked memory run beside the computation."""
    return device.type not in _WITHOUT_PINNED_MEMORY


def pinned(batch: Batch) -> Batch:
    """Return the batch in pinned memory; what can't be pinned is returned unchanged."""
    if isinstance(batch, Tensor):
        # A subclass would become a plain tensor.
        is_plain = type(batch) is Tensor and batch.layout is torch.strided
        is_plain = is_plain and not batch.is_nested and not batch.is_quantized
        if is_plain and batch.device.type == "cpu":
            return batch.pin_memory()
        return batch
    if callable(getattr(batch, "pin_memory", None)):
        if all(tensor.device.type == "cpu" for tensor in held_tensors(batch)):
            return batch.pin_memory()
        return batch
    return with_parts(batch, pinned)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move the tensors, and the objects with a method `to`, in collections and records at any depth to the device.

    Anything else stays as it is. Where the device supports it, copies go through pinned memory and are asynchronous.
    """
    if isinstance(batch, Tensor):
        if pins_memory(device):
            return pinned(batch).to(device, non_blocking=True)
        return batch.to(device)
    if callable(getattr(batch, "to", None)) and not isinstance(batch, type):
        if pins_memory(device):
            batch = pinned(batch)
        return _object_to(batch, device)
    return with_parts(batch, lambda part: to_device(part, device))


def _object_to(batch: Any, device: torch.device) -> Any:
    kind: Any = type(batch)
    options = {"non_blocking": True} if _takes_non_blocking(kind) else {}
    try:
        moved = batch.to(device, **options)
    except Exception:
        # `to` may have another meaning: that of a quantity takes a unit, that of a time a zone.
        if next(held_tensors(batch), None) is None:
            return batch
        raise
    # A `to` that moves in place may return None.
    return batch if moved is None else moved


@cache
def _takes_non_blocking(kind: type) -> bool:
    try:
        parameters = signature(kind.to).parameters  # type: ignore[attr-defined]
    except (AttributeError, ValueError):
        # It is not a method of the class, or is written in C.
        return False
    takes_any = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())
    return takes_any or "non_blocking" in parameters


def prefetch(
    batches: Iterable[Batch], device: torch.device, *, side_stream: SideStream | None = None
) -> Iterator[Batch]:
    """Yield the batches with their tensors on `device`, in order.

    If copies can run beside the computation, each is begun one batch ahead. Otherwise a batch is taken from `batches`
    when it is asked for.
    """
    if side_stream is None and not pins_memory(device):
        for batch in batches:
            yield to_device(batch, device)
        return
    if side_stream is None:
        side_stream = SideStream(device)
    pending: tuple[Batch, torch.Event] | None = None
    for batch in batches:
        begun = side_stream.begin_copy(batch)
        if pending is not None:
            yield side_stream.wait_for(*pending)
        pending = begun
    if pending is not None:
        yield side_stream.wait_for(*pending)


@final
class SideStream:
    """Copies on a stream of its own: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device=device)

    def begin_copy(self, batch: Batch) -> tuple[Batch, torch.Event]:
        """Return the batch on its way to the device, and the event of its arrival."""
        with self._stream:
            moved = to_device(batch, self._device)
        return moved, self._stream.record_event()

    def wait_for(self, moved: Batch, copied: torch.Event) -> Batch:
        """Let the current stream, not the host, wait for the copy."""
        current = torch.accelerator.current_stream(self._device)
        current.wait_event(copied)
        # Otherwise its memory might serve the next copy while this stream reads it.
        record_stream(moved, current, self._device)
        return moved
