"""What this machine has: GPUs through NVML and cores this process may use. Without torch, without opening a GPU."""

from __future__ import annotations

import importlib
import os
import re
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from framework.errors import TopologyError


@dataclass(frozen=True)
class Gpu:
    """A GPU that CUDA would show to a process started now."""

    name: str
    uuid: str
    memory_bytes: int


def visible_gpus() -> list[Gpu]:
    """The NVIDIA GPUs left by CUDA_VISIBLE_DEVICES, in its order; none without a driver.

    Raises TopologyError when there is a driver and it doesn't answer: training on the CPU instead would hide that.
    """
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except ImportError:
        return []
    except Exception as error:
        if type(error).__name__ in ("NVMLError_LibraryNotFound", "NVMLError_DriverNotLoaded"):
            return []
        raise TopologyError(_driver_trouble(error)) from error
    try:
        gpus = [_describe(nvml, nvml.nvmlDeviceGetHandleByIndex(i)) for i in range(nvml.nvmlDeviceGetCount())]
        return _select(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"), nvml=nvml)
    except nvml.NVMLError as error:
        raise TopologyError(_driver_trouble(error)) from error
    finally:
        nvml.nvmlShutdown()


def count_gpus() -> int:
    return len(visible_gpus())


def resolve_gpus(requested: int | None) -> int:
    """GPUs to use on this node: `requested`, or all there are for None.

    Raises TopologyError when more are requested than there are. 0 asks no driver.
    """
    if requested == 0:
        return 0
    there = count_gpus()
    if requested is None:
        return there
    if requested > there:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        limit = "" if shown is None else f" (CUDA_VISIBLE_DEVICES={shown!r})"
        many = "no GPU" if there == 0 else "1 GPU" if there == 1 else f"{there} GPUs"
        use = "" if there == 0 else f"Use trainer.gpus={there} or trainer.gpus=auto. "
        raise TopologyError(
            f"trainer.gpus={requested}, but this machine has {many}{limit}.\n"
            f"{use}To run as CPU processes instead: trainer.gpus=0 topology.procs_per_node={requested}"
        )
    return requested


def cpu_count(root: Path = Path("/")) -> int:
    """Cores this process may use: its affinity, or less where a control group's quota grants less; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    # Rounded down: one thread more than the quota grants gets all of them throttled.
    return max(1, min([cores, *(int(quota) for quota in _cpu_quotas(root))]))


def openmp_environment(root: Path = Path("/"), *, alone: bool = True) -> dict[str, str]:
    """What OpenMP is to read when it is loaded: its threads are not to spin where cores are shared.

    Threads that wait for each other spin by default, which is the faster way on cores of their own: on two, several
    times as fast as sleeping. It is ruinous where something else is at work on half of the cores or more, or where a
    control group grants fewer than there are. What is at work is counted now: a load average still tells of what has
    ended a minute ago.

    alone: false for one of several processes of a run that begin at once: none is at work on another's cores, and each
    would count the others.
    """
    cores = cpu_count(root)
    granted_less = hasattr(os, "sched_getaffinity") and cores < len(os.sched_getaffinity(0))
    is_shared = granted_less or (alone and _running_elsewhere(root) >= (os.cpu_count() or 1) / 2)
    return {"OMP_WAIT_POLICY": "PASSIVE"} if is_shared else {}


def _running_elsewhere(root: Path) -> int:
    """Threads on this machine that run or want to, but this one; 0 where the system doesn't tell (it isn't Linux).

    The fewest of three readings within some milliseconds: what wakes up for a moment doesn't count.
    https://man7.org/linux/man-pages/man5/proc_loadavg.5.html
    """
    fewest = sys.maxsize
    for _ in range(3):
        words = _read(root / "proc/loadavg").split()
        fewest = min(fewest, int(words[3].split("/")[0]) - 1 if len(words) > 3 else 0)
        if fewest <= 0:
            return 0
        time.sleep(0.003)
    return fewest


def threads_per_process(procs: int) -> int:
    """The share of a process that has its cores together with `procs` - 1 others; at least 1."""
    return max(1, cpu_count() // procs)


class Sharers(NamedTuple):
    """number: processes that have the same cores, this one too. own: which of them this one is, from 0."""

    number: int
    own: int


def sharers_of_cores(*, local_rank: int, procs: int, environ: Mapping[str, str]) -> Sharers:
    """Who has this process's cores: all `procs` of the node, but where srun has bound each of them, those bound alike.

    For a process that is a task of srun's itself; children of one have its variables too. Of the bindings srun knows,
    those that list a mask or a core for each task tell who shares them, and automatic ones do so. One that isn't in
    force, since the process has another number of cores by now, counts for nothing.
    https://slurm.schedmd.com/srun.html#OPT_SLURM_CPU_BIND_LIST
    """
    everyone = Sharers(procs, local_rank)
    on_node = re.match(r"\d+", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if (
        "TORCHELASTIC_RUN_ID" in environ  # the task is torchrun
        or environ.get("SLURM_LOCALID") != str(local_rank)
        or on_node is None
        or int(on_node[0]) != procs
    ):
        return everyone
    listed = _bound_cores(environ)
    if not listed or listed[local_rank % len(listed)].bit_count() != len(os.sched_getaffinity(0)):
        return everyone
    alike = [task for task in range(procs) if listed[task % len(listed)] == listed[local_rank % len(listed)]]
    return Sharers(len(alike), alike.index(local_rank))


def _bound_cores(environ: Mapping[str, str]) -> list[int]:
    """A mask for each task of this node, begun again where it is too short; empty where srun lists none."""
    kind, entries = environ.get("SLURM_CPU_BIND_TYPE"), environ.get("SLURM_CPU_BIND_LIST", "").split(",")
    try:
        if kind == "mask_cpu:":
            return [int(entry, 16) for entry in entries]
        if kind == "map_cpu:":
            return [1 << int(entry, 0) for entry in entries]
    except ValueError:  # entries of a form that isn't documented
        return []
    return []


def _driver_trouble(error: Exception) -> str:
    way_out = "Mend it (does nvidia-smi work?), or use trainer.gpus=0 for the CPU."
    return f"The NVIDIA driver doesn't answer: {error}.\n{way_out}"


def _describe(nvml: Any, handle: Any) -> Gpu:
    # Very old bindings give bytes.
    name, uuid = (_text(read(handle)) for read in (nvml.nvmlDeviceGetName, nvml.nvmlDeviceGetUUID))
    try:
        memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError_NotSupported:  # GPUs that share the host's memory
        memory = 0
    return Gpu(name, uuid, memory)


def share_of_cores(cores: Collection[int], *, local_rank: int, processes: int) -> set[int]:
    """The cores that are one process's own, where those of a node share `cores`; none where there are too few.

    Neighbours, as their numbers go: they mostly share a cache and a memory node.
    """
    size = len(cores) // processes
    return set(sorted(cores)[local_rank * size : (local_rank + 1) * size])


def keep_to_cores(cores: Collection[int]) -> None:
    """Let every thread of this process run on these cores alone, and what it starts from now on."""
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread.name), cores)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _select(gpus: list[Gpu], visible: str | None, *, nvml: Any) -> list[Gpu]:
    """What CUDA makes of CUDA_VISIBLE_DEVICES: entries up to the first that names nothing; none if one comes twice.

    https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables
    """
    if visible is None:
        return gpus
    selected: list[Gpu] = []
    for entry in (part.strip() for part in visible.split(",")):
        gpu = _find(gpus, entry, nvml=nvml)
        if gpu is None:
            break
        if gpu in selected:
            return []
        selected.append(gpu)
    return selected


def _find(gpus: list[Gpu], entry: str, *, nvml: Any) -> Gpu | None:
    if entry.startswith("MIG-"):
        try:
            return _describe(nvml, nvml.nvmlDeviceGetHandleByUUID(entry))
        except nvml.NVMLError:
            return None
    if entry.startswith("GPU-"):  # the beginning of a UUID is enough where it fits one
        found = [gpu for gpu in gpus if gpu.uuid.startswith(entry)]
        return found[0] if len(found) == 1 else None
    if entry.isdecimal() and int(entry) < len(gpus):
        return gpus[int(entry)]
    return None


def _cpu_quotas(root: Path) -> Iterator[float]:
    """Cores granted by the process's control groups and all above them, versions 1 and 2."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux, or no /proc
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            yield from _quotas_up(root / "sys/fs/cgroup", group, read=_quota_v2)
        elif "cpu" in controllers.split(","):
            for mount in (root / "sys/fs/cgroup" / name for name in ("cpu", controllers)):
                if mount.is_dir():
                    yield from _quotas_up(mount, group, read=_quota_v1)
                    break


def _quotas_up(mount: Path, group: str, *, read: Any) -> Iterator[float]:
    # In a container the path may be the host's and not exist here; the container's own limit is at the mount.
    folder = mount / group.strip("/")
    for level in (folder, *folder.parents):
        if not level.is_relative_to(mount):
            return
        quota = read(level)
        if quota is not None:
            yield quota


def _quota_v2(folder: Path) -> float | None:
    return _ratio(_read(folder / "cpu.max").split())


def _quota_v1(folder: Path) -> float | None:
    return _ratio([_read(folder / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")])


def _ratio(words: list[str]) -> float | None:
    """`quota period`, both in microseconds; "max" or -1 is no limit."""
    if len(words) != 2 or not words[0].isdecimal() or not words[1].isdecimal():
        return None
    return int(words[0]) / int(words[1])


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
