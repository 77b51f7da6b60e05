"""How a process that the system killed for want of memory is recognised."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.internals import count_oom_kills, killed_since


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("at_mount", [False, True])
def test_only_later_oom_kills_are_counted(tmp_path: Path, version: int, at_mount: bool) -> None:
    """A container may see the host's path, and its own group at the mount."""
    (tmp_path / "proc/7").mkdir(parents=True)
    lines = {1: "5:cpu:/\n4:memory,hugetlb:/jobs/a\n0::/\n", 2: "0::/jobs/a\n"}[version]
    (tmp_path / "proc/7/cgroup").write_text(lines)
    folder = tmp_path / "sys/fs/cgroup" / ("memory" if version == 1 else "") / ("" if at_mount else "jobs/a")
    folder.mkdir(parents=True)
    file = folder / ("memory.oom_control" if version == 1 else "memory.events")
    file.write_text("oom 5\noom_kill 3\n")
    before = count_oom_kills(7, tmp_path)
    assert not killed_since(before)
    file.write_text("oom 5\noom_kill 4\n")
    assert killed_since(before)
    # The process has no control group.
    assert not killed_since(count_oom_kills(8, tmp_path))
