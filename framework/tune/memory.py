"""How much memory steps take and how much there is for them: on a CPU it is measured, a GPU's allocator is held to it.

A CPU's memory can't be tried out: where there is too little, the system kills a process, seldom the one that asked.
"""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, final

import torch

from framework.data.room import host_available

_PEAK, _NOW = "VmHWM", "VmRSS"
_RESET_PEAK = "5"  # https://man7.org/linux/man-pages/man5/proc_pid_clear_refs.5.html
_SAID = re.compile(
    r"out of memory|can't allocate memory|not enough memory|std::bad_alloc|CUBLAS_STATUS_ALLOC_FAILED"
    r"|CUDNN_STATUS_ALLOC_FAILED|CUSOLVER_STATUS_ALLOC_FAILED"
)


class Memory(Protocol):
    """room_bytes: what steps may take beyond what was there before them; None where that isn't known.

    is_held: whether going beyond raises an error, so that it may be tried.
    """

    room_bytes: int | None
    is_held: bool

    def clear(self) -> None:
        """Give back what is free, and count the peak from here on."""
        ...

    def peak_bytes(self) -> int | None:
        """The most that was taken since `clear`, beyond what was there at first; None where that isn't known."""
        ...


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether it, or what it was raised from, says that there is no memory: torch's own error, Python's, or a text of
    an allocator or a library on the device."""
    while error is not None:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(error, RuntimeError) and _SAID.search(str(error)):
            return True
        error = error.__cause__
    return False


@contextmanager
def memory_of(devices: Sequence[torch.device], *, procs: int, sharing: int, margin: float) -> Iterator[Memory]:
    """The memory that steps on these devices take.

    Every rank of a node must ask at the same time. procs: of this node; sharing: those of them that use this one's
    device; margin: the share of what is free that is left alone.
    """
    if devices[0].type == "cpu":
        yield HostMemory(sharing=procs, margin=margin)
        return
    memory = DeviceMemory(devices, sharing=sharing, margin=margin)
    memory.hold()
    try:
        yield memory
    finally:
        memory.release()


@final
class HostMemory:
    """This process's part of what the host, or its control group, has left. Linux; elsewhere nothing is known."""

    is_held = False

    def __init__(self, *, sharing: int, margin: float, root: Path = Path("/")) -> None:
        self._folder = root / "proc/self"
        _give_back()
        self._before = self._resident(_NOW)
        available = None if self._before is None else host_available(root)
        self.room_bytes = None if available is None else int(available * (1 - margin)) // sharing

    def clear(self) -> None:
        _give_back()
        with suppress(OSError):  # then it is the peak of the whole process: too high rather than too low
            (self._folder / "clear_refs").write_text(_RESET_PEAK)

    def peak_bytes(self) -> int | None:
        peak = self._resident(_PEAK)
        return None if peak is None or self._before is None else max(0, peak - self._before)

    def _resident(self, name: str) -> int | None:
        try:
            lines = (self._folder / "status").read_text().splitlines()
        except OSError:
            return None
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


@final
class DeviceMemory:
    """What is free of a process's devices, without the margin, over those that share them.

    While it is held, torch's allocator refuses more as if the device had no more. Where an accelerator can't be asked,
    as `mps`, the room is not known, and is what it gives.
    """

    is_held = True

    def __init__(self, devices: Sequence[torch.device], *, sharing: int, margin: float) -> None:
        self._devices = list(dict.fromkeys(devices))
        self._shares: dict[torch.device, float] = {}
        self._shares_before: dict[torch.device, float] = {}
        self.room_bytes: int | None = None
        _give_back(devices=True)
        if hasattr(self._of(self._devices[0]), "mem_get_info"):
            self.room_bytes = 0
            for device in self._devices:
                free, total = self._of(device).mem_get_info(device)
                room = int(free * (1 - margin)) // sharing
                self.room_bytes += room
                self._shares[device] = min(1.0, (room + self._of(device).memory_reserved(device)) / total)
        self._before = self._allocated("memory_allocated")

    def hold(self) -> None:
        for device, share in self._shares.items():
            module = self._of(device)
            if hasattr(module, "set_per_process_memory_fraction"):
                get = getattr(module, "get_per_process_memory_fraction", None)
                self._shares_before[device] = 1.0 if get is None else get(device)
                module.set_per_process_memory_fraction(share, device)

    def release(self) -> None:
        for device, share in self._shares_before.items():
            self._of(device).set_per_process_memory_fraction(share, device)

    def clear(self) -> None:
        _give_back(devices=True)
        for device in self._devices:
            if hasattr(self._of(device), "reset_peak_memory_stats"):
                self._of(device).reset_peak_memory_stats(device)

    def peak_bytes(self) -> int | None:
        peak = self._allocated("max_memory_allocated")
        return None if peak is None or self._before is None else max(0, peak - self._before)

    def _allocated(self, name: str) -> int | None:
        ask = getattr(self._of(self._devices[0]), name, None)
        return None if ask is None else sum(int(ask(device)) for device in self._devices)

    def _of(self, device: torch.device) -> Any:
        return torch.get_device_module(device)


def _give_back(*, devices: bool = False) -> None:
    """Have what nothing uses any more go back to the system."""
    gc.collect()
    if devices:
        torch.accelerator.empty_cache()
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
