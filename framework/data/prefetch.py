"""Move batches to the device: the next one is copied on a side stream while the model computes with this one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from framework.types import Batch

_WITHOUT_PINNED_MEMORY = {"cpu", "mps", "meta"}


def pins_memory(device: torch.device) -> bool:
    """Return True if copies to `device` from page-locked memory run beside the computation."""
    return device.type not in _WITHOUT_PINNED_MEMORY


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move the tensors in lists, tuples, named tuples and mappings at any depth; mappings become dicts.

    For devices that gain from it the copy goes through pinned memory and doesn't wait.
    """
    if isinstance(batch, Tensor):
        if batch.device.type == "cpu" and pins_memory(device):
            return batch.pin_memory().to(device, non_blocking=True)
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        moved = [to_device(value, device) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch


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
    side_stream = SideStream(device) if side_stream is None else side_stream
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
        for leaf in tree_leaves(moved):
            if isinstance(leaf, Tensor) and leaf.device == self._device:
                leaf.record_stream(current)  # or its memory might serve the next copy while this stream reads it
        return moved
