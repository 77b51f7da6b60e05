"""What a rank reports about itself and its machine before anything is exchanged."""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
from pathlib import Path
from typing import Any

import torch

from framework.config.schema import Config
from framework.distributed.context import Context
from framework.system.files import free_bytes
from framework.system.hardware import available_memory, cpu_count
from framework.system.run_dir import RunDir
from framework.system.versions import installed_versions

_BUFFERS = 8  # at most three of a size exist at a time, and other things need memory, too


def facts(config: Config, context: Context, run_dir: RunDir) -> dict[str, Any]:
    """Return a rank's facts as preflight.json has them."""
    shm = Path("/dev/shm")
    host = socket.gethostname()
    driver = None
    versions = {"python": platform.python_version(), **installed_versions(("framework", "torch"))}
    if context.device.type == "cuda" and torch.version.cuda is not None:
        import pynvml

        pynvml.nvmlInit()
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        versions["cuda"] = torch.version.cuda
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "rank": context.rank,
        "name": f"rank {context.rank}{f' ({host})' if context.topology.nnodes > 1 else ''}",
        "node": context.node_rank,
        "host": host,
        "local_rank": context.local_rank,
        "devices": [{"device": str(device), "name": device_name(device)} for device in dict.fromkeys(context.devices)],
        "driver": driver,
        "versions": versions,
        "cores": cpu_count(),
        "threads": torch.get_num_threads(),
        "free_disk_bytes": free_bytes(run_dir.path),
        "free_shm_bytes": free_bytes(shm) if shm.exists() else None,
        "data_root": data_root(config.data.root),
        "interconnect": interconnect() if context.local_rank == 0 else None,
    }


def buffer_limit(context: Context) -> float:
    """Return the bytes of one buffer that surely fit in the memory of host and device, shared with the node's ranks."""
    topology = context.topology
    host = available_memory()
    limits = [float("inf") if host is None else host / (_BUFFERS * topology.procs_per_node)]
    module = torch.get_device_module(context.device)
    if hasattr(module, "mem_get_info"):
        limits.append(module.mem_get_info(context.device)[0] / (_BUFFERS * topology.procs_per_gpu))
    return min(limits)


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
    """Return the name that people know."""
    if device.type != "cpu":
        return str(getattr(torch.get_device_module(device), "get_device_name", lambda _: "")(device))
    cpus = Path("/proc/cpuinfo")  # on Linux
    found = re.search(r"^model name\s*: (.*)", cpus.read_text() if cpus.exists() else "", re.MULTILINE)
    return platform.machine() if found is None else found[1]


def interconnect() -> str | None:
    """Return what `nvidia-smi topo -m` prints; None without that program, or if it doesn't answer."""
    command = ["nvidia-smi", "topo", "-m"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=10.0, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.rstrip()
