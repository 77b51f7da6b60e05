"""Batches on their way to the device: the next one is copied on a side stream while this one is computed with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from framework.data.device import pins_memory, to_device
from framework.types import Batch


class Copier(Protocol):
    """Begins copies to a device, and hands over what was copied."""

    def begin(self, batch: Batch, /) -> Any:
        """A ticket for a batch on its way; doesn't wait."""
        ...

    def hand_over(self, ticket: Any, /) -> Batch:
        """The batch, which whatever computes next on the device may use; doesn't wait."""
        ...


def on_device(batches: Iterable[Batch], device: torch.device, *, copier: Copier | None = None) -> Iterator[Batch]:
    """The batches with their tensors on `device`, in order.

    Where copies can run beside the computation, each is begun one batch ahead. Elsewhere a batch is taken from
    `batches` when it is asked for, and moved.
    """
    if copier is None and not pins_memory(device):
        for batch in batches:
            yield to_device(batch, device)
        return
    copier = SideStream(device) if copier is None else copier
    pending: Any = None
    for batch in batches:
        begun = (copier.begin(batch),)
        if pending is not None:
            yield copier.hand_over(*pending)
        pending = begun
    if pending is not None:
        yield copier.hand_over(*pending)


@final
class SideStream:
    """Copies on a stream of its own: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device=device)

    def begin(self, batch: Batch) -> tuple[Batch, torch.Event]:
        with self._stream:
            moved = to_device(batch, self._device)
        return moved, self._stream.record_event()

    def hand_over(self, ticket: tuple[Batch, torch.Event]) -> Batch:
        moved, copied = ticket
        current = torch.accelerator.current_stream(self._device)
        current.wait_event(copied)
        for leaf in tree_leaves(moved):
            if isinstance(leaf, Tensor) and leaf.device == self._device:
                leaf.record_stream(current)  # or its memory might serve the next copy while this stream reads it
        return moved
