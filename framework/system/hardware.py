"""What this machine has: GPUs through NVML, cores and memory this process may use. No torch; opens no GPU."""

from __future__ import annotations

import importlib
import os
import re
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from framework.errors import TopologyError
from framework.system.formatting import format_count

_DRIVER_DEVICE = Path("/dev/nvidiactl")

# Version 1 of control groups writes a number above this if there is no limit.
_NO_MEMORY_LIMIT = 1 << 60


@dataclass(frozen=True)
class Gpu:
    """A GPU that CUDA would show to a process started now."""

    name: str
    uuid: str


def visible_gpus() -> list[Gpu]:
    """Return the NVIDIA GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; none without a driver.

    The driver is queried once. Raises TopologyError if it is installed but can't be queried: training on the CPU would
    hide that.
    """
    return list(_ask_driver(importlib.import_module("pynvml"), os.environ.get("CUDA_VISIBLE_DEVICES")))


@lru_cache(maxsize=1)
def _ask_driver(nvml: Any, visible: str | None) -> tuple[Gpu, ...]:
    if visible is not None and visible.strip() in ("", "-1"):
        return ()
    try:
        nvml.nvmlInit()
        try:
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
            gpus = [_describe(nvml, handle) for handle in handles]
            return tuple(_select(gpus, visible, nvml=nvml))
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        if type(error).__name__ not in ("NVMLError_LibraryNotFound", "NVMLError_DriverNotLoaded"):
            raise TopologyError(
                f"The NVIDIA driver doesn't answer: {error}.\n"
                "Fix it (does nvidia-smi work?), or use trainer.gpus=0 for the CPU."
            ) from error
        if not _DRIVER_DEVICE.exists():
            return ()
        raise TopologyError(
            f"This machine has an NVIDIA driver ({_DRIVER_DEVICE}), but NVML, which tells its GPUs, can't be used: "
            f"{error}.\nInstall libnvidia-ml.so.1 of the driver's version; in a container, set "
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility. Or use trainer.gpus=0 for the CPU."
        ) from error


def count_gpus() -> int:
    """Return the number of visible GPUs."""
    return len(visible_gpus())


def resolve_gpus(requested: int | None) -> int:
    """Return the number of GPUs to use on this node: `requested`, or all visible ones for None.

    0 is returned without asking a driver. Raises TopologyError if fewer than `requested` are visible.
    """
    if requested == 0:
        return 0
    num_visible = count_gpus()
    if requested is None:
        return num_visible
    if requested <= num_visible:
        return requested

    has = "no GPU"
    use = ""
    if num_visible > 0:
        has = format_count(num_visible, "GPU")
        use = f"Use trainer.gpus={num_visible} or trainer.gpus=auto. "
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    limit = "" if variable is None else f" (CUDA_VISIBLE_DEVICES={variable!r})"
    raise TopologyError(
        f"trainer.gpus={requested}, but this machine has {has}{limit}.\n"
        f"{use}To run as CPU processes instead: trainer.gpus=0 topology.procs_per_node={requested}"
    )


def own_cores() -> frozenset[int]:
    """Return the cores that this process is bound to, by number; empty outside Linux."""
    if not hasattr(os, "sched_getaffinity"):
        return frozenset()
    return frozenset(os.sched_getaffinity(0))


def set_own_cores(cores: Collection[int]) -> None:
    """Bind this process to these cores. Does nothing for none, or for those that it is bound to already."""
    if cores and own_cores() != cores:
        os.sched_setaffinity(0, cores)


def cpu_count(root: Path = Path("/")) -> int:
    """Return the cores that this process may use, by its affinity and its control groups' quotas; at least 1."""
    cores = len(own_cores()) or os.cpu_count() or 1
    for quota in _cpu_quotas(root):
        # Rounded down: one thread more than the quota grants gets all of them throttled.
        cores = min(cores, int(quota))
    return max(1, cores)


def openmp_environment(root: Path = Path("/"), *, alone: bool = True) -> dict[str, str]:
    """Return what to put into the environment of processes that load OpenMP: no spinning on shared cores.

    By default, threads that wait for each other spin. On two cores of their own that is several times as fast as
    sleeping; if other work occupies half of the cores or more, or a control group grants fewer cores than the machine
    has, it is ruinous (docs/speed.md). What runs is counted now, as a load average lags by a minute.

    alone: False for one of several processes that a run starts at once: they don't compete, but each would count the
        others.
    """
    cores = cpu_count(root)
    is_limited = hasattr(os, "sched_getaffinity") and cores < len(os.sched_getaffinity(0))
    is_busy = alone and _running_elsewhere(root) >= (os.cpu_count() or 1) / 2
    if is_limited or is_busy:
        return {"OMP_WAIT_POLICY": "PASSIVE"}
    return {}


def _running_elsewhere(root: Path) -> int:
    """Return how many threads of this machine are running or runnable, except this one; 0 outside Linux.

    The minimum of three readings within some milliseconds, so that a thread that wakes up briefly doesn't count.
    https://man7.org/linux/man-pages/man5/proc_loadavg.5.html
    """
    readings: list[int] = []
    for _ in range(3):
        words = _read(root / "proc/loadavg").split()
        if len(words) < 4:
            return 0
        # The fourth word is RUNNING/ALL, this thread included.
        running = int(words[3].split("/")[0]) - 1
        if running <= 0:
            return 0
        readings.append(running)
        time.sleep(0.003)
    return min(readings)


def threads_per_process(procs: int) -> int:
    """Return the number of threads for each of `procs` processes that share these cores; at least 1."""
    return max(1, cpu_count() // procs)


def processes_on_cores(*, local_rank: int, procs: int, environ: Mapping[str, str]) -> int:
    """Return how many processes share this one's cores: all `procs` of the node, or the srun tasks with the same mask.

    A mask counts if srun started this process itself (children of a task have the same variables) and it is in force:
    this process has as many cores as its mask. https://slurm.schedmd.com/srun.html#OPT_SLURM_CPU_BIND_LIST
    """
    is_task = "TORCHELASTIC_RUN_ID" not in environ and environ.get("SLURM_LOCALID") == str(local_rank)
    if is_task and environ.get("SLURM_CPU_BIND_TYPE") == "mask_cpu:":
        masks = [int(mask, 16) for mask in environ["SLURM_CPU_BIND_LIST"].split(",")]
        # A list that is too short begins again.
        task_masks = [masks[task % len(masks)] for task in range(procs)]
        own_mask = masks[local_rank % len(masks)]
        if own_mask.bit_count() == len(os.sched_getaffinity(0)):
            return task_masks.count(own_mask)
    return procs


def _describe(nvml: Any, handle: Any) -> Gpu:
    return Gpu(nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetUUID(handle))


def _select(gpus: list[Gpu], visible: str | None, *, nvml: Any) -> list[Gpu]:
    """Return what CUDA_VISIBLE_DEVICES selects: its entries up to the first invalid one; none if one is repeated.

    https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables
    """
    if visible is None:
        return gpus
    selected: list[Gpu] = []
    for entry in visible.split(","):
        gpu = _find(gpus, entry.strip(), nvml=nvml)
        if gpu is None:
            break
        if gpu in selected:
            return []
        selected.append(gpu)
    return selected


def _find(gpus: list[Gpu], entry: str, *, nvml: Any) -> Gpu | None:
    """Return the GPU that an entry of CUDA_VISIBLE_DEVICES names; None if it is invalid."""
    if entry.startswith("MIG-"):
        try:
            return _describe(nvml, nvml.nvmlDeviceGetHandleByUUID(entry))
        except nvml.NVMLError:
            return None
    # A unique prefix of a UUID is enough.
    if entry.startswith("GPU-"):
        matches = [gpu for gpu in gpus if gpu.uuid.startswith(entry)]
        return matches[0] if len(matches) == 1 else None
    if entry.isdecimal() and int(entry) < len(gpus):
        return gpus[int(entry)]
    return None


def available_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that the host and this process's control groups can give without swapping.

    None if that isn't known, as outside Linux.
    """
    available: list[int] = []
    host = re.search(r"^MemAvailable:\s*(\d+)", _read(root / "proc/meminfo"), re.MULTILINE)
    if host is not None:
        available.append(int(host[1]) * 1024)

    for levels, version in control_groups("memory", root=root):
        if version == 1:
            limit_file = "memory.limit_in_bytes"
            usage_file = "memory.usage_in_bytes"
            cache_entry = "total_inactive_file"
        else:
            limit_file = "memory.max"
            usage_file = "memory.current"
            cache_entry = "inactive_file"
        for level in levels:
            limit = _read(level / limit_file).strip()
            usage = _read(level / usage_file).strip()
            if not limit.isdecimal() or not usage.isdecimal() or int(limit) >= _NO_MEMORY_LIMIT:
                continue
            # The kernel gives cached files up when memory is needed.
            cache = re.search(rf"^{cache_entry} (\d+)$", _read(level / "memory.stat"), re.MULTILINE)
            cached = int(cache[1]) if cache else 0
            available.append(int(limit) - int(usage) + cached)
    if not available:
        return None
    return max(0, min(available))


def control_groups(
    controller: str, *, root: Path = Path("/"), pid: int | str = "self"
) -> Iterator[tuple[list[Path], int]]:
    """Yield the folders of a process's control group and of all above it up to the mount, and the version, 1 or 2."""
    for line in _read(root / f"proc/{pid}/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # In version 2 there is one hierarchy for all controllers; in version 1 each one, or several, have their own.
        version = 1 if controllers else 2
        names = (controller, controllers) if version == 1 else ("",)
        mounts = [root / "sys/fs/cgroup" / name for name in names]
        mount = next((path for path in mounts if path.is_dir()), None)
        if mount is None:
            continue
        # In a container the path may be the host's and not exist here; the container's own limit is at the mount.
        folder = mount / group.strip("/")
        yield [level for level in (folder, *folder.parents) if level.is_relative_to(mount)], version


def _cpu_quotas(root: Path) -> Iterator[float]:
    """Yield the cores granted by the process's control groups and all above them."""
    for levels, version in control_groups("cpu", root=root):
        names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        for level in levels:
            words = " ".join(_read(level / name) for name in names).split()
            # "max" or -1 is no limit.
            if len(words) == 2 and words[0].isdecimal():
                yield int(words[0]) / int(words[1])


def _read(file: Path) -> str:
    """Return the text of a file; empty if it can't be read."""
    try:
        return file.read_text()
    except OSError:
        return ""
