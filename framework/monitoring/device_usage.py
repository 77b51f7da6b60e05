"""Memory of the ranks and utilization of their accelerators, for the logs."""

from __future__ import annotations

import logging
import resource
import sys
import time
from collections.abc import Sequence
from typing import final

import torch

from framework.distributed.context import Context
from framework.monitoring.slow_ranks import CURVES_OF_RANKS

# A reading takes about a millisecond; NVML itself averages over up to a second.
_EVERY_S = 1.0
_GB = 1e9
# The unit of `ru_maxrss`: https://man7.org/linux/man-pages/man2/getrusage.2.html
_RSS_UNIT = 1 if sys.platform == "darwin" else 1024

_log = logging.getLogger("framework")


@final
class DeviceUsage:
    """Reads peak memory and utilization, at most once a second. Doesn't wait for the devices."""

    def __init__(self, context: Context) -> None:
        self._rank = context.rank
        self._world_size = context.world_size
        unique_devices = dict.fromkeys(context.devices)
        self._devices = [device for device in unique_devices if device.type != "cpu"]
        self._memory_gb = 0.0
        self._next_s = 0.0
        # If the last `row` has read the memory.
        self._is_new = False
        self._has_utilization = True

    def row(self) -> list[float]:
        """Return this rank's memory at its place in a vector for all ranks, to be summed over ranks for `values`."""
        self._is_new = time.monotonic() >= self._next_s
        if self._is_new:
            self._next_s = time.monotonic() + _EVERY_S
            self._memory_gb = self._peak_bytes() / _GB
        numbers = [0.0] * self._world_size
        numbers[self._rank] = self._memory_gb
        return numbers

    def values(self, memory_gb: Sequence[float]) -> dict[str, float]:
        """Return the values to log; empty if the last `row` was less than a second after the one before.

        `device/memory_gb`: the peak memory of the fullest rank, in 10^9 bytes: of tensors on its fullest accelerator;
        on the CPU, resident memory. `device/memory_gb_rank_N`: of each rank, if there are few.
        `device/utilization`: the share of the last second in which a kernel ran, averaged over this rank's devices.
        """
        if not self._is_new:
            return {}
        values = {"device/memory_gb": max(memory_gb)}
        if 1 < len(memory_gb) <= CURVES_OF_RANKS:
            for rank, rank_memory_gb in enumerate(memory_gb):
                values[f"device/memory_gb_rank_{rank}"] = rank_memory_gb
        if self._devices and self._has_utilization:
            # There may be no NVML bindings, or a GPU doesn't support them, such as a MIG slice.
            try:
                values["device/utilization"] = self._utilization()
            except Exception as error:
                _log.info("device/utilization isn't logged: %s", error)
                self._has_utilization = False
        return values

    def _utilization(self) -> float:
        module = torch.get_device_module(self._devices[0])
        percents = [module.utilization(device) for device in self._devices]
        return float(sum(percents) / len(percents) / 100)

    def _peak_bytes(self) -> float:
        if not self._devices:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT
        module = torch.get_device_module(self._devices[0])
        return float(max(module.max_memory_allocated(device) for device in self._devices))
