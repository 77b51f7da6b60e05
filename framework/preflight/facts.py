"""What a rank says of itself and its machine before anything is exchanged."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from framework.checkpoint import room
from framework.config.schema import Config
from framework.data.room import host_available
from framework.distributed.context import Context
from framework.hardware import cpu_count
from framework.run_dir import RunDir
from framework.versions import installed_versions

_PACKAGES = ("framework", "torch")
_SHM = Path("/dev/shm")
_TOPOLOGY_TIMEOUT_S = 10.0
_BUFFERS = 8  # at most three of a size are there at a time, and what else is at work needs memory, too


def facts(config: Config, context: Context, run_dir: RunDir) -> dict[str, Any]:
    """As preflight.json has them, and room_bytes: how large one exchange may be on this rank."""
    return {
        "rank": context.rank,
        "node": context.node_rank,
        "host": socket.gethostname(),
        "local_rank": context.local_rank,
        "devices": [device_name(device) for device in dict.fromkeys(context.devices)],
        "driver": _driver(context.device),
        "versions": _versions(context.device),
        "cores": cpu_count(),
        "threads": torch.get_num_threads(),
        "free_disk_bytes": free_bytes(run_dir.path),
        "free_shm_bytes": free_bytes(_SHM),
        "data_root": data_root(config.data.root),
        "interconnect": interconnect() if context.local_rank == 0 else None,
        "room_bytes": _room(context),
    }


def free_bytes(folder: Path) -> int | None:
    """What may be written below `folder`; None where that can't be known."""
    try:
        return room.free_bytes(folder) if folder.exists() else None
    except OSError:
        return None


def data_root(root: str | None) -> dict[str, str] | None:
    """path and state: `there`, `missing` or `not readable`; None where no folder is configured."""
    if root is None:
        return None
    path = Path(root).expanduser()
    readable = path.is_dir() and os.access(path, os.R_OK | os.X_OK)
    return {"path": str(path), "state": "there" if readable else "not readable" if path.exists() else "missing"}


def device_name(device: torch.device) -> dict[str, str]:
    """Return `device` and `name` as a person reads them."""
    name = _processor() if device.type == "cpu" else _accelerator(device)
    return {"device": str(device), "name": name}


def _accelerator(device: torch.device) -> str:
    ask = getattr(torch.get_device_module(device), "get_device_name", None)
    return "" if ask is None else str(ask(device))


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _driver(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            version = pynvml.nvmlSystemGetDriverVersion()
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # no bindings, or another vendor's devices; torch has found them all the same
        return None
    return version.decode() if isinstance(version, bytes) else str(version)


def _versions(device: torch.device) -> dict[str, str]:
    found = {"python": platform.python_version(), **installed_versions(_PACKAGES)}
    if device.type == "cuda" and torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
        with suppress(Exception):  # a torch that was built without it
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def interconnect() -> str | None:
    """Return what `nvidia-smi topo -m` prints; None without that program, or if it doesn't answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, "topo", "-m"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TOPOLOGY_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.rstrip() if done.returncode == 0 else None


def _room(context: Context) -> int | None:
    """Bytes of one buffer that surely fit: in the host's memory, shared with the node's ranks, and on the device."""
    host = host_available()
    rooms = [] if host is None else [host // (_BUFFERS * context.topology.procs_per_node)]
    if context.device.type != "cpu":
        ask = getattr(torch.get_device_module(context.device), "mem_get_info", None)
        users = -(-context.topology.procs_per_node * context.topology.span // context.topology.gpus_per_node)
        rooms += [] if ask is None else [int(ask(context.device)[0]) // (_BUFFERS * users)]
    return min(rooms) if rooms else None
