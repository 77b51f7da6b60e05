"""Memory and utilization of a rank's accelerators, for the logs."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import final

import torch

_EVERY_S = 1.0  # a reading takes about a millisecond; NVML itself averages over up to a second
_GB = 1e9

_log = logging.getLogger("framework")


@final
class DeviceUsage:
    """Reads memory and utilization of a rank's accelerators, and nothing on the CPU."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = [device for device in dict.fromkeys(devices) if device.type != "cpu"]
        self._next_s = 0.0
        self._has_utilization = True

    def read(self) -> dict[str, float]:
        """Return the values to log, at most once a second. Doesn't wait for the devices.

        `device/memory_gb`: the peak memory of tensors on the fullest device, in 10^9 bytes.
        `device/utilization`: the share of the last second in which a kernel ran, averaged over devices.
        """
        if not self._devices or time.monotonic() < self._next_s:
            return {}
        self._next_s = time.monotonic() + _EVERY_S
        module = torch.get_device_module(self._devices[0])
        values: dict[str, float] = {}
        if hasattr(module, "max_memory_allocated"):
            values["device/memory_gb"] = max(map(module.max_memory_allocated, self._devices)) / _GB
        if self._has_utilization and hasattr(module, "utilization"):
            try:
                values["device/utilization"] = sum(map(module.utilization, self._devices)) / len(self._devices) / 100
            except Exception as error:  # no NVML bindings, or a GPU without it, such as a MIG slice
                _log.info("device/utilization isn't logged: %s", error)
                self._has_utilization = False
        return values
