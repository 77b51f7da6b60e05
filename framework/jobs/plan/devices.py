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
    has_bf16: bool = True


_GPUS = {
    "b200": Device("NVIDIA B200", int(178.3 * _GIB)),
    "h200": Device("NVIDIA H200", int(139.8 * _GIB)),
    "h100": Device("NVIDIA H100 80GB HBM3", int(79.1 * _GIB)),
    "a100": Device("NVIDIA A100-SXM4-80GB", int(79.2 * _GIB)),
    "a100-40gb": Device("NVIDIA A100-SXM4-40GB", int(39.4 * _GIB)),
    "l40s": Device("NVIDIA L40S", int(44.4 * _GIB)),
    "l4": Device("NVIDIA L4", int(22.0 * _GIB)),
    "a10": Device("NVIDIA A10", int(22.1 * _GIB)),
    "t4": Device("Tesla T4", int(14.6 * _GIB), has_bf16=False),
    "v100": Device("Tesla V100-SXM2-16GB", int(15.8 * _GIB), has_bf16=False),
    "rtx4090": Device("NVIDIA GeForce RTX 4090", int(23.5 * _GIB)),
    "rtx3090": Device("NVIDIA GeForce RTX 3090", int(23.6 * _GIB)),
}


def find_device(name: DeviceName, *, uses_gpus: bool) -> Device:
    """Return the device, the largest one for `any`. uses_gpus: of the run, which decides what `this` is."""
    if name == "any":
        return max(_GPUS.values(), key=_memory)
    if name != "this":
        return _GPUS[name]
    if not uses_gpus or count_gpus() == 0:
        return Device("CPU", available_memory(), is_gpu=False)
    # Looked at, not opened.
    gpu = visible_gpus()[0]
    for device in _GPUS.values():
        if device.name == gpu.name:
            return device
    return Device(gpu.name, None)


def gpus_by_memory() -> list[tuple[str, Device]]:
    """Return the GPUs by their names in `plan.device`, the smallest first."""
    return sorted(_GPUS.items(), key=lambda item: _memory(item[1]))


def _memory(device: Device) -> int:
    return device.memory_bytes or 0
