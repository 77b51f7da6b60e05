"""Devices that job=plan can forecast for: what they are called, and how much memory they have. No torch."""

from __future__ import annotations

from typing import NamedTuple

from framework.config.schema import DeviceName
from framework.system.hardware import available_memory, count_gpus, visible_gpus

_GIB = 1 << 30


class Device(NamedTuple):
    """A device to forecast for."""

    # As torch.cuda.get_device_name has it, or "CPU".
    name: str
    # What a process may take, as torch.cuda.mem_get_info shows it of an idle device; None if unknown.
    memory_bytes: int | None
    is_gpu: bool = True


_GPUS = {
    "b200": Device("NVIDIA B200", int(178.3 * _GIB)),
    "h200": Device("NVIDIA H200", int(139.8 * _GIB)),
    "h100": Device("NVIDIA H100 80GB HBM3", int(79.1 * _GIB)),
    "a100": Device("NVIDIA A100-SXM4-80GB", int(79.2 * _GIB)),
    "a100-40gb": Device("NVIDIA A100-SXM4-40GB", int(39.4 * _GIB)),
    "l40s": Device("NVIDIA L40S", int(44.4 * _GIB)),
    "l4": Device("NVIDIA L4", int(22.0 * _GIB)),
    "a10": Device("NVIDIA A10", int(22.1 * _GIB)),
    "t4": Device("Tesla T4", int(14.6 * _GIB)),
    "v100": Device("Tesla V100-SXM2-16GB", int(15.8 * _GIB)),
    "rtx4090": Device("NVIDIA GeForce RTX 4090", int(23.5 * _GIB)),
    "rtx3090": Device("NVIDIA GeForce RTX 3090", int(23.6 * _GIB)),
}


def find_device(name: DeviceName, *, uses_gpus: bool) -> Device:
    """Return the device. uses_gpus: of the run, which decides what `this` is. Its GPU is looked at, not opened."""
    if name != "this":
        return _GPUS[name]
    if not uses_gpus or count_gpus() == 0:
        return Device("CPU", available_memory(), is_gpu=False)
    gpu = visible_gpus()[0]
    for device in _GPUS.values():
        if device.name == gpu.name:
            return device
    return Device(gpu.name, None)


def gpus_that_hold(size_bytes: int) -> list[str]:
    """Return the names of the GPUs whose memory is at least this large, the smallest first."""
    by_memory = sorted(_GPUS.items(), key=lambda item: item[1].memory_bytes or 0)
    return [name for name, device in by_memory if (device.memory_bytes or 0) >= size_bytes]
