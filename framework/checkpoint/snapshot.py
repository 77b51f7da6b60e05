"""Copies of a state in host memory that is kept from save to save, for a thread to write while training continues."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Mapping
from copy import copy
from typing import Any, final

import torch
from torch import Tensor

# Devices that copy to pinned memory without the host waiting.
_PINNED = frozenset({"cuda", "xpu"})
# From this size on, a buffer is registered with CUDA. That takes a system call; smaller buffers waste little without.
_LEAST_REGISTERED_BYTES = 2**20


@final
class Snapshots:
    """Copies states; each copy overwrites the one before.

    Writing to new memory takes twice as long as copying into memory that was used before.
    """

    def __init__(self) -> None:
        # The buffers of the copy before, which are free now, and those of the present copy: by their size in bytes, and
        # whether they are pinned.
        self._free: dict[tuple[int, bool], list[Tensor]] = {}
        self._used: dict[tuple[int, bool], list[Tensor]] = {}
        # The copies of storages, by the storage's number, which is unique as long as the state exists.
        self._copied: dict[int, Tensor] = {}
        # Devices that may still be copying, and the events that tell when they are done.
        self._devices: set[torch.device] = set()
        self._events: list[torch.Event] = []

    def take(self, state: Any) -> Any:
        """Return a copy of `state` (see `check_plain`). It may be read once `wait` has returned.

        Copies whole storages, as `torch.save` does, so that tensors that share memory do so in the copy. Devices copy
        before any work that is queued later; the host doesn't wait for them.
        """
        self._free = self._used
        self._used = {}
        copied = self._copy(state)
        self._events = [torch.accelerator.current_stream(device).record_event() for device in self._devices]
        self._copied.clear()
        self._devices.clear()
        return copied

    def wait(self) -> None:
        """Wait until devices have copied what `take` was given."""
        for event in self._events:
            event.synchronize()

    def _copy(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._copy_tensor(value.detach())
        if isinstance(value, Mapping):
            # A copy has the versions that a module's state has as an attribute.
            copied: Any = copy(value)
            for key, entry in value.items():
                copied[key] = self._copy(entry)
            return copied
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._copy, value))
        return copy(value)

    def _copy_tensor(self, tensor: Tensor) -> Tensor:
        is_plain = tensor.layout is torch.strided and not tensor.is_quantized
        if not is_plain or tensor.is_conj() or tensor.is_neg():
            return tensor.cpu().clone()
        storage = tensor.untyped_storage()
        if storage._cdata not in self._copied:
            self._copied[storage._cdata] = self._copy_storage(storage, tensor.device)
        copied = self._copied[storage._cdata].untyped_storage()
        return torch.empty(0, dtype=tensor.dtype).set_(copied, tensor.storage_offset(), tensor.shape, tensor.stride())

    def _copy_storage(self, storage: torch.UntypedStorage, device: torch.device) -> Tensor:
        is_pinned = device.type in _PINNED
        key = (storage.nbytes(), is_pinned)
        free = self._free.get(key)
        if free:
            buffer = free.pop()
        elif is_pinned:
            buffer = _new_pinned_buffer(storage.nbytes(), device)
        else:
            buffer = torch.empty(storage.nbytes(), dtype=torch.uint8)
        self._used.setdefault(key, []).append(buffer)

        content = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        buffer.copy_(content, non_blocking=is_pinned)
        if is_pinned:
            self._devices.add(device)
        return buffer


def _new_pinned_buffer(size_bytes: int, device: torch.device) -> Tensor:
    """Return host memory that is pinned for the device."""
    if device.type != "cuda" or size_bytes < _LEAST_REGISTERED_BYTES:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    # Torch's allocator would round the size up to a power of two. Shared memory starts at a page of its own, and a fork
    # doesn't move its pages.
    buffer = torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=torch.uint8)
    runtime = torch.cuda.cudart()
    torch.cuda.check_error(int(runtime.cudaHostRegister(buffer.data_ptr(), size_bytes, 0)))
    # Not at the end of the process, when CUDA may be gone.
    weakref.finalize(buffer, runtime.cudaHostUnregister, buffer.data_ptr()).atexit = False
    return buffer
