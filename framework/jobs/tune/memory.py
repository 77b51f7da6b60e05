"""The memory that training steps may take, and what they took: of the host, or of devices."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import final

import torch

from framework.system.hardware import available_memory

# https://man7.org/linux/man-pages/man5/proc_pid_clear_refs.5.html
_RESET_PEAK = "5"


@final
class HostMemory:
    """This process's share of what the host, or its control group, has left. Nothing is known except on Linux.

    A batch that is too large can't be tried here: the system would kill a process, seldom the one that asked for the
    memory. So the peaks of smaller ones are measured, and its own is predicted from these.
    """

    def __init__(self, *, sharing: int, margin: float, root: Path = Path("/")) -> None:
        """Measure what is free, and what this process takes already.

        Args:
            sharing: processes of this node.
            margin: share of the free memory that stays free.
            root: the folder that `proc` and `sys` are in.
        """
        self._folder = root / "proc/self"
        self.clear()
        self._before = self._status("VmRSS")
        self.room_bytes = None
        available_bytes = available_memory(root)
        if available_bytes is not None:
            self.room_bytes = int(available_bytes * (1 - margin)) // sharing

    def clear(self) -> None:
        """Return free memory to the system, and measure the peak from here on."""
        gc.collect()
        # Another C library may not have it.
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        # If it is refused, the peak is that of the whole process: too high rather than too low.
        with suppress(OSError):
            (self._folder / "clear_refs").write_text(_RESET_PEAK)

    def peak_bytes(self) -> int | None:
        """Return the most that was taken since `clear`, beyond what was taken at first; None if it isn't known."""
        peak = self._status("VmHWM")
        if peak is None or self._before is None:
            return None
        return max(0, peak - self._before)

    def _status(self, name: str) -> int | None:
        """Return a value of the process's status file, in bytes; None if it isn't known."""
        try:
            text = (self._folder / "status").read_text()
        except OSError:
            return None
        match = re.search(rf"^{name}:\s*(\d+) kB", text, re.MULTILINE)
        if match is None:
            return None
        return int(match[1]) * 1024


@final
class DeviceMemory:
    """This process's share of the free memory of its devices, as torch's allocator takes it.

    Nothing is known of devices that don't report their memory, such as `mps`: there the device itself is the limit.
    """

    def __init__(self, devices: Sequence[torch.device], *, sharing: int, margin: float) -> None:
        """Measure what is free, and what this process takes already.

        Args:
            sharing: processes that use the same device.
            margin: share of the free memory that stays free.
        """
        # Those that report their memory.
        self._devices: list[torch.device] = []
        if hasattr(torch.get_device_module(devices[0]), "mem_get_info"):
            self._devices = list(dict.fromkeys(devices))
        self.clear()
        self.room_bytes = None
        if self._devices:
            free_bytes = 0
            for device in self._devices:
                free_on_device, _ = torch.accelerator.get_memory_info(device)
                free_bytes += free_on_device
            self.room_bytes = int(free_bytes * (1 - margin)) // sharing
        self._before = sum(map(torch.accelerator.memory_allocated, self._devices))

    def clear(self) -> None:
        """Return free memory to the devices, and measure the peak from here on."""
        gc.collect()
        torch.accelerator.empty_cache()
        for device in self._devices:
            torch.accelerator.reset_peak_memory_stats(device)

    def peak_bytes(self) -> int | None:
        """Return the most that was taken since `clear`, beyond what was taken at first; None if it isn't known."""
        if not self._devices:
            return None
        taken = sum(map(torch.accelerator.max_memory_allocated, self._devices))
        return max(0, taken - self._before)
