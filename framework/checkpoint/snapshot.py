"""A copy of a state in buffers that are kept from save to save, made while training goes on.

What only an optimizer's step changes (weights, the optimizer's state) may be copied beside the forward and backward
that follow; `Snapshot.finish` waits for that and must be called before anything changes it. Everything else is copied
before `take` returns. Like `torch.save`, it copies whole storages, so that what shares memory does so in the copy.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Executor, Future
from typing import Any, final

import torch
from torch import Tensor, nn

from framework.checkpoint.files import BLOCK_BYTES

_MAPPED_FROM_BYTES = 1 << 16  # below it, aligning costs more than it gains
_CHUNK_BYTES = 16 << 20
_STREAMED = frozenset({"cuda", "xpu"})  # devices that copy to pinned memory beside what they compute


@final
class KeptBuffers:
    """Memory on the host for copies, handed out by size; what the last copy didn't need any more is given back.

    A first write to new memory costs twice what copying into it does afterwards.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, bool], list[Tensor]] = {}
        self._used: dict[tuple[int, bool], list[Tensor]] = {}

    def start_over(self) -> None:
        """All that was handed out before may be handed out again."""
        self._free, self._used = self._used, {}

    def get(self, size_bytes: int, *, pinned: bool) -> Tensor:
        """A flat uint8 tensor of that size, of its own storage; pinned for copies from an accelerator."""
        key = (size_bytes, pinned)
        free = self._free.get(key)
        buffer = free.pop() if free else _new_buffer(size_bytes, pinned=pinned)
        self._used.setdefault(key, []).append(buffer)
        return buffer


@final
class Snapshot:
    """One copy: `state` is of the structure that was given. It may be read after `finish` and `wait_for_devices`."""

    def __init__(self, state: Any, copying: _Copying) -> None:
        self.state = state
        self._copying = copying
        self._copied: Future[None] | None = None

    def begin(self, executor: Executor) -> None:
        """Copy what was left, in a thread of `executor` where the host has to."""
        self._copying.start_on_devices()
        self._copied = executor.submit(self._copying.copy_on_host)

    def finish(self) -> str | None:
        """Return once what was left may change; the name of something that has changed before, so that it is torn.

        A device that copies is made to wait before what it is given next; the host isn't.
        """
        if self._copied is not None:
            self._copied.result()
        return self._copying.release()

    def wait_for_devices(self) -> None:
        self._copying.wait_for_devices()


def take(state: Any, *, late: Collection[Tensor], buffers: KeptBuffers) -> Snapshot:
    """Copy all tensors of `state` (see `check_plain` for what may be in it) but those in memory of `late`.

    late: what nothing but an optimizer's step changes. One copy at a time may use `buffers`.
    """
    buffers.start_over()
    copying = _Copying({tensor.untyped_storage()._cdata for tensor in late}, buffers)
    return Snapshot(copying.of(state, name=""), copying)


def fingerprints(tensors: Iterable[Tensor]) -> list[int]:
    """Return for each tensor the sum of its bytes read as 64-bit integers; waits for the device once.

    A single changed number always changes the sum. Several changes cancel out with a probability of 2**-64.
    """
    sums = [_sum_of_bits(tensor) for tensor in tensors]
    return torch.stack([each.to(sums[0].device) for each in sums]).tolist() if sums else []


def _sum_of_bits(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().reshape(-1)
    raw = (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).view(torch.uint8)
    if raw.storage_offset() % 8:
        raw = raw.clone()
    words = raw.numel() // 8 * 8
    return raw[:words].view(torch.int64).sum() + raw[words:].sum(dtype=torch.int64)


def bytes_of(state: Any) -> int:
    """What the tensors of `state` take in files, in whole blocks; what shares memory is counted once."""
    storages: dict[int, int] = {}

    def count(value: Any) -> None:
        if isinstance(value, Tensor) and value.layout is torch.strided:
            storages[value.untyped_storage()._cdata] = value.untyped_storage().nbytes()
        elif isinstance(value, Mapping):
            for each in value.values():
                count(each)
        elif isinstance(value, (list, tuple)):
            for each in value:
                count(each)

    count(state)
    return sum(-(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES for size_bytes in storages.values())


@final
class _Copying:
    def __init__(self, late: set[int], buffers: KeptBuffers) -> None:
        self._late = late
        self._buffers = buffers
        self._kept: dict[int, Tensor] = {}  # of a storage's number; it lives as long as the state it is in
        self._on_host: list[tuple[Tensor, Tensor]] = []  # (from, to), flat
        self._on_device: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
        self._versions: list[tuple[str, Tensor, int]] = []
        self._events: list[tuple[torch.device, Any]] = []

    def of(self, value: Any, *, name: str) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value, name=name)
        if isinstance(value, Mapping):
            copies = {key: self.of(each, name=f"{name}.{key}".lstrip(".")) for key, each in value.items()}
            copy = type(value)(copies)  # type: ignore[call-arg]
            if hasattr(value, "__dict__"):  # a module's state has its versions there
                copy.__dict__.update(value.__dict__)
            return copy
        if isinstance(value, (list, tuple)):
            return type(value)(self.of(each, name=f"{name}[{index}]") for index, each in enumerate(value))
        if isinstance(value, (set, bytearray)):
            return value.copy()
        return value

    def copy_on_host(self) -> None:
        """What is on the CPU already; lets other threads run meanwhile."""
        for source, target in self._on_host:
            size_bytes = source.numel()
            for begin in range(0, size_bytes, _CHUNK_BYTES):
                ctypes.memmove(
                    target.data_ptr() + begin, source.data_ptr() + begin, min(_CHUNK_BYTES, size_bytes - begin)
                )
        self._on_host = []

    def start_on_devices(self) -> None:
        """Copy beside what each device does next, through a stream of its own."""
        for device, pairs in self._on_device.items():
            stream = torch.Stream(device=device)
            stream.wait_stream(torch.accelerator.current_stream(device))
            with stream:
                for source, target in pairs:
                    target.copy_(source, non_blocking=True)
            self._events.append((device, stream.record_event()))

    def wait_for_devices(self) -> None:
        for _, event in self._events:
            event.synchronize()

    def release(self) -> str | None:
        for device, event in self._events:
            torch.accelerator.current_stream(device).wait_event(event)
        return next((name for name, tensor, version in self._versions if tensor._version != version), None)

    def _tensor(self, tensor: Tensor, *, name: str) -> Tensor:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            return tensor.detach().cpu().clone()
        storage = tensor.untyped_storage()
        is_late = storage._cdata in self._late and not tensor.is_inference()  # whose changes aren't counted
        kept = self._kept.get(storage._cdata)
        if kept is None:
            kept = self._kept[storage._cdata] = self._storage(storage, tensor.device, late=is_late)
        if is_late:
            self._versions.append((name, tensor, tensor._version))
        copy = torch.empty(0, dtype=tensor.dtype)
        with torch.no_grad():
            copy.set_(kept.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        copy.requires_grad_(tensor.requires_grad)
        return nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy

    def _storage(self, storage: torch.UntypedStorage, device: torch.device, *, late: bool) -> Tensor:
        """A buffer for the storage, filled at once unless it may be late."""
        flat = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        is_streamed = device.type in _STREAMED
        kept = self._buffers.get(storage.nbytes(), pinned=is_streamed)
        if is_streamed:
            on_this = self._on_device.setdefault(device, [])
            if late:
                on_this.append((flat, kept))
            else:
                kept.copy_(flat, non_blocking=True)  # before what the device is given next
        elif late and device.type == "cpu":
            self._on_host.append((flat, kept))
        else:
            kept.copy_(flat)
        return kept


def _new_buffer(size_bytes: int, *, pinned: bool) -> Tensor:
    if pinned or size_bytes < _MAPPED_FROM_BYTES:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned)
    mapped = mmap.mmap(-1, size_bytes)  # begins at a page, as a file that is written past the page cache wants it
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=torch.uint8)
