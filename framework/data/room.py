"""How much memory data may take: on the device, and on the host. Read from the system, nothing is tried."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

DEVICE_SHARE = 0.25
"""Of the device's free memory, for all parts of the data together: model and activations need the rest."""
HOST_SHARE = 0.25
"""Of the host's available memory, over all processes of the node."""
UNKNOWN_HOST_ROOM = 1 << 29
"""Bytes over all processes of the node, where the system doesn't tell what is available, as macOS: small data sets."""

_NO_LIMIT = 1 << 60  # version 1 of control groups writes a number above this for none


def device_room(device: torch.device, *, sharing: int) -> int:
    """Bytes that one of `sharing` processes may yet keep on an accelerator; 0 where that can't be asked, as for `mps`.

    To be asked before there is a model: what this process has on the device by then are parts of the data that were
    loaded before, and they count.
    """
    module = torch.get_device_module(device)
    asked = [getattr(module, name, None) for name in ("mem_get_info", "memory_reserved", "memory_allocated")]
    if None in asked:
        return 0
    (free_bytes, _), reserved_bytes, taken_bytes = (ask(device) for ask in asked if ask is not None)
    share_bytes = int((free_bytes + reserved_bytes) * DEVICE_SHARE) // sharing
    return max(0, share_bytes - int(taken_bytes))


def host_room(*, procs: int, root: Path = Path("/")) -> int:
    """Bytes that one of `procs` processes on this node may keep in the host's memory."""
    available = host_available(root)
    return (UNKNOWN_HOST_ROOM if available is None else int(available * HOST_SHARE)) // procs


def host_available(root: Path = Path("/")) -> int | None:
    """Bytes the host can still give without swapping, or a control group of this process, where that is less.

    None where the system doesn't tell, as it isn't Linux.
    """
    lines = _read(root / "proc/meminfo").splitlines()
    named = {name: rest.split()[0] for name, _, rest in (line.partition(":") for line in lines) if rest.split()}
    of_host = [int(named["MemAvailable"]) * 1024] if "MemAvailable" in named else []
    known = [*of_host, *_left_in_groups(root)]
    return max(0, min(known)) if known else None


def _left_in_groups(root: Path) -> Iterator[int]:
    """What the process's control groups and all above them have left, versions 1 and 2; caches count as left."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = mount / group.strip("/")
        for level in (folder, *folder.parents):
            if not level.is_relative_to(mount):
                break
            limit, used = (_read(level / name).strip() for name in names[:2])
            if limit.isdecimal() and used.isdecimal() and int(limit) < _NO_LIMIT:
                yield int(limit) - int(used) + _cached(level / "memory.stat", names[2])


def _cached(file: Path, name: str) -> int:
    values = dict(line.split(maxsplit=1) for line in _read(file).splitlines() if " " in line)
    return int(values.get(name, 0))


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
