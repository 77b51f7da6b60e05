"""Whether it was the system's out-of-memory killer: it sends SIGKILL as anybody can, but the kernel keeps account."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import final

_KMSG_BYTES = 8192  # the longest record
_KILLED = re.compile(rb"Killed process (\d+) \(")


@final
class OomWatch:
    """Begins to watch when it is made; `close` ends it."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._kills: dict[Path, int] = {}  # as counted when the group was first seen
        self._groups: dict[int, list[Path]] = {}  # pid → where its groups count
        self._logged: set[int] = set()
        self._log: int | None = None
        try:
            self._log = os.open(root / "dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._log, 0, os.SEEK_END)
        except OSError:  # for root alone on many systems; the counts remain
            self.close()

    def follow(self, pid: int) -> None:
        """Look after a living process from now on."""
        self._groups[pid] = list(_files(self._root, pid))
        for file in self._groups[pid]:
            self._kills.setdefault(file, _count(file))

    def killed(self, pid: int) -> bool:
        """Whether the kernel has killed `pid`, or anything in its control group, for want of memory.

        False also where the system tells nothing: no memory controller, a locked log.
        """
        counted = any(_count(file) > self._kills[file] for file in self._groups.get(pid, ()))
        return counted or pid in self._read_log()

    def close(self) -> None:
        if self._log is not None:
            os.close(self._log)
            self._log = None

    def _read_log(self) -> set[int]:
        """All that the kernel says it has killed."""
        while self._log is not None:
            try:
                record = os.read(self._log, _KMSG_BYTES)  # one at a time
            except BrokenPipeError:  # a record was overwritten meanwhile; the next read goes on after it
                continue
            except OSError:  # BlockingIOError: all is read
                break
            if not record:  # an ordinary file's end
                break
            self._logged |= {int(number) for number in _KILLED.findall(record)}
        return self._logged


def _files(root: Path, pid: int) -> Iterator[Path]:
    """Where a process's memory control group counts kills, in versions 1 and 2. Those above it are others' too."""
    try:
        lines = (root / f"proc/{pid}/cgroup").read_text().splitlines()
    except OSError:  # not Linux, no /proc, or it has ended
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        mount, name = root / "sys/fs/cgroup", "memory.events"
        if controllers != "":
            if "memory" not in controllers.split(","):
                continue
            mount, name = mount / "memory", "memory.oom_control"
        # In a container the path may be the host's and not exist here; the container's own group is at the mount.
        own = mount / group.strip("/") / name
        yield own if own.exists() else mount / name


def _count(file: Path) -> int:
    try:
        found = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0
