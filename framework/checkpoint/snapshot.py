"""Copies of a state in host memory that is kept from save to save, for a thread to write while training continues."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

_MAPPED_FROM_BYTES = 1 << 16  # below it, aligning costs more than it gains
_PINNED = frozenset({"cuda", "xpu"})  # devices that copy to pinned memory without the host waiting


@final
class Snapshots:
    """Copies states; each copy overwrites the one before.

    Writing to new memory takes twice as long as copying into memory that was used before.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, bool], list[Tensor]] = {}
        self._used: dict[tuple[int, bool], list[Tensor]] = {}
        self._copied: dict[int, Tensor] = {}  # by the number of the storage, which lives as long as the state it is in
        self._devices: set[torch.device] = set()
        self._events: list[torch.Event] = []

    def take(self, state: Any) -> Any:
        """Return a copy of `state` (see `check_plain`). It may be read once `wait` has returned.

        Copies whole storages, as `torch.save` does, so that tensors that share memory do so in the copy. Devices copy
        before any work that is queued later; the host doesn't wait for them.
        """
        self._free, self._used = self._used, {}
        copy = self._copy(state)
        self._events = [torch.accelerator.current_stream(device).record_event() for device in self._devices]
        self._copied.clear()
        self._devices.clear()
        return copy

    def wait(self) -> None:
        """Wait until devices have copied what `take` was given."""
        for event in self._events:
            event.synchronize()

    def _copy(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._copy_tensor(value)
        if isinstance(value, Mapping):
            copy = type(value)({key: self._copy(each) for key, each in value.items()})  # type: ignore[call-arg]
            if hasattr(value, "__dict__"):  # a module's state has its versions there
                copy.__dict__.update(value.__dict__)
            return copy
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._copy, value))
        return value.copy() if isinstance(value, (set, bytearray)) else value

    def _copy_tensor(self, tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            return tensor.detach().cpu().clone()
        storage = tensor.untyped_storage()
        copied = self._copied.get(storage._cdata)
        if copied is None:
            copied = self._copied[storage._cdata] = self._copy_storage(storage, tensor.device)
        copy = torch.empty(0, dtype=tensor.dtype)
        with torch.no_grad():
            copy.set_(copied.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        copy.requires_grad_(tensor.requires_grad)
        return nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy

    def _copy_storage(self, storage: torch.UntypedStorage, device: torch.device) -> Tensor:
        is_pinned = device.type in _PINNED
        key = (storage.nbytes(), is_pinned)
        free = self._free.get(key)
        copy = free.pop() if free else _new_buffer(storage.nbytes(), is_pinned=is_pinned)
        self._used.setdefault(key, []).append(copy)
        copy.copy_(torch.empty(0, dtype=torch.uint8, device=device).set_(storage), non_blocking=is_pinned)
        if is_pinned:
            self._devices.add(device)
        return copy


def _new_buffer(size_bytes: int, *, is_pinned: bool) -> Tensor:
    if is_pinned or size_bytes < _MAPPED_FROM_BYTES:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=is_pinned)
    mapped = mmap.mmap(-1, size_bytes)  # begins at a page, as a file that is written past the page cache wants it
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=torch.uint8)
