"""Whether the kernel has killed a process of a memory control group because the memory ran out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from framework.system.hardware import control_groups


def count_oom_kills(pid: int, root: Path = Path("/")) -> dict[Path, int]:
    """Return how many kills the memory control groups of a living process have counted, by file.

    Empty if there is no memory controller. The groups above a process's own count the kills of others, too.
    """
    kills: dict[Path, int] = {}
    for levels, version in control_groups("memory", root=root, pid=pid):
        name = "memory.events" if version == 2 else "memory.oom_control"
        file = levels[0] / name
        if not file.exists():
            file = levels[-1] / name
        kills[file] = _kills_in(file)
    return kills


def killed_since(before: Mapping[Path, int]) -> bool:
    """Return True if the kernel has killed a process in these groups since `count_oom_kills` returned `before`."""
    return any(_kills_in(file) > kills for file, kills in before.items())


def _kills_in(file: Path) -> int:
    try:
        text = file.read_text()
    except OSError:
        return 0
    line = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    if line is None:
        return 0
    return int(line[1])
