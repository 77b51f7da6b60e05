"""What a rank reports about itself and its machine: versions, memory, disks, the speed of its devices."""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from framework.config.schema import Config
from framework.distributed.collectives import barrier
from framework.distributed.context import Context, accelerator_name
from framework.jobs.preflight.peers import Peers
from framework.system.files import free_bytes
from framework.system.hardware import available_memory, cpu_count
from framework.system.run_dir import RunDir
from framework.system.versions import installed_versions

# At most three buffers of a size exist at a time, and other things need memory, too.
_BUFFERS = 8
# Sides of the square matrices that are multiplied.
_CPU_SIDE = 1024
_GPU_SIDE = 4096


def facts(config: Config, context: Context, run_dir: RunDir) -> dict[str, Any]:
    """Return a rank's facts as preflight.json has them."""
    host = socket.gethostname()
    name = f"rank {context.rank}"
    if context.topology.nnodes > 1:
        name += f" ({host})"

    versions = {"python": platform.python_version(), **installed_versions(("framework", "torch"))}
    driver = None
    if context.device.type == "cuda" and torch.version.cuda is not None:
        driver = _nvidia_driver()
        versions["cuda"] = torch.version.cuda
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))

    devices = []
    for device in dict.fromkeys(context.devices):
        devices.append({"device": str(device), "name": device_name(device)})

    free_shm_bytes = None
    shm = Path("/dev/shm")
    if shm.exists():
        free_shm_bytes = free_bytes(shm)

    links_of_devices = None
    if context.local_rank == 0:
        links_of_devices = interconnect()
    return {
        "rank": context.rank,
        "name": name,
        "node": context.node_rank,
        "host": host,
        "local_rank": context.local_rank,
        "devices": devices,
        "driver": driver,
        "versions": versions,
        "cores": cpu_count(),
        "threads": torch.get_num_threads(),
        "free_disk_bytes": free_bytes(run_dir.path),
        "free_shm_bytes": free_shm_bytes,
        "data_root": data_root(config.data.root),
        "interconnect": links_of_devices,
    }


def _nvidia_driver() -> str:
    import pynvml

    pynvml.nvmlInit()
    return str(pynvml.nvmlSystemGetDriverVersion())


def buffer_limit(context: Context) -> float:
    """Return the bytes of one buffer that surely fit in the memory of host and device, shared with the node's ranks."""
    topology = context.topology
    limit = float("inf")
    host_bytes = available_memory()
    if host_bytes is not None:
        limit = host_bytes / (_BUFFERS * topology.procs_per_node)
    module = torch.get_device_module(context.device)
    if hasattr(module, "mem_get_info"):
        free_on_device, _ = module.mem_get_info(context.device)
        limit = min(limit, free_on_device / (_BUFFERS * topology.procs_per_gpu))
    return limit


def data_root(root: str | None) -> dict[str, str] | None:
    """Return path and state: `there`, `missing` or `not readable`; None if no folder is configured."""
    if root is None:
        return None
    path = Path(root).expanduser()
    state = "missing"
    if path.is_dir() and os.access(path, os.R_OK | os.X_OK):
        state = "there"
    elif path.exists():
        state = "not readable"
    return {"path": str(path), "state": state}


def device_name(device: torch.device) -> str:
    """Return the name that people know; empty if an accelerator doesn't say it."""
    if device.type == "cpu":
        return _cpu_name()
    return accelerator_name(device)


def _cpu_name() -> str:
    """Return the model, which Linux knows, or the architecture."""
    cpus = Path("/proc/cpuinfo")
    if cpus.exists():
        model = re.search(r"^model name\s*: (.*)", cpus.read_text(), re.MULTILINE)
        if model is not None:
            return model[1]
    return platform.machine()


def interconnect() -> str | None:
    """Return what `nvidia-smi topo -m` prints; None without that program, or if it doesn't answer."""
    command = ["nvidia-smi", "topo", "-m"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=10.0, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.rstrip()


def measure_matmul(peers: Peers, *, seconds: float) -> list[dict[str, Any]]:
    """Return the FLOP/s of each device of this rank. All ranks measure at the same time; every rank must call it."""
    context = peers.context
    speeds = []
    with peers.check("matmul"):
        for device in dict.fromkeys(context.devices):
            side = _CPU_SIDE if device.type == "cpu" else _GPU_SIDE
            left = torch.ones(side, side, device=device)
            right = torch.ones(side, side, device=device)
            # The first product loads kernels.
            product = left @ right
            context.wait_for_devices()
            barrier(context)

            times_s = list[float]()
            while sum(times_s) < seconds or not times_s:
                began = time.perf_counter()
                torch.mm(left, right, out=product)
                context.wait_for_devices()
                times_s.append(time.perf_counter() - began)
            speeds.append({"device": str(device), "flops_per_s": 2 * side**3 / median(times_s)})
    return speeds
