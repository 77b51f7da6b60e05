"""How much memory data may take: on the device, and on the host. Read from the system, nothing is tried."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

DEVICE_SHARE = 0.25
"""Of the device's free memory, for each part of the data: model and activations need the rest."""
HOST_SHARE = 0.25
"""Of the host's available memory, over all processes of the node."""

_NO_LIMIT = 1 << 60  # version 1 of control groups writes a number above this for none


def device_room(device: torch.device, *, sharing: int) -> int:
    """Bytes that one of `sharing` processes may keep on an accelerator; 0 where that can't be asked, as for `mps`."""
    ask = getattr(torch.get_device_module(device), "mem_get_info", None)
    if ask is None:
        return 0
    free_bytes, _ = ask(device)
    return int(free_bytes * DEVICE_SHARE) // sharing


def host_room(*, procs: int, root: Path = Path("/")) -> int:
    """Bytes that one of `procs` processes on this node may keep in the host's memory."""
    return int(host_available(root) * HOST_SHARE) // procs


def host_available(root: Path = Path("/")) -> int:
    """Bytes the host can still give without swapping, or a control group of this process, where that is less.

    Where the system doesn't tell (it isn't Linux), 0.
    """
    lines = _read(root / "proc/meminfo").splitlines()
    named = {name: rest.split()[0] for name, _, rest in (line.partition(":") for line in lines) if rest.split()}
    available = int(named.get("MemAvailable", 0)) * 1024
    return max(0, min([available, *_left_in_groups(root)]))


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
