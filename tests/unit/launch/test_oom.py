from __future__ import annotations

from pathlib import Path

import pytest

from framework.launch.oom import OomWatch


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A file system with a process 7, and the log of its kernel."""
    (tmp_path / "proc/7").mkdir(parents=True)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kmsg").touch()
    return tmp_path


def write_group(root: Path, *, version: int, group: str, kills: int, at_mount: bool = False) -> None:
    lines = {1: f"5:cpu:/\n4:memory,hugetlb:{group}\n0::/\n", 2: f"0::{group}\n"}[version]
    (root / "proc/7/cgroup").write_text(lines)
    folder = root / "sys/fs/cgroup" / ("memory" if version == 1 else "")
    folder = folder if at_mount else folder / group.strip("/")
    folder.mkdir(parents=True, exist_ok=True)
    name, other = ("memory.oom_control", "under_oom 0") if version == 1 else ("memory.events", "oom 5")
    (folder / name).write_text(f"{other}\noom_kill {kills}\n")


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("at_mount", [False, True])
def test_the_groups_account_is_kept_from_when_a_process_is_seen(root: Path, version: int, at_mount: bool) -> None:
    """A container may see the host's path, and its own group at the mount."""
    write_group(root, version=version, group="/jobs/a", kills=3, at_mount=at_mount)
    watch = OomWatch(root)
    watch.follow(7)
    assert not watch.killed(7)
    write_group(root, version=version, group="/jobs/a", kills=4, at_mount=at_mount)
    assert watch.killed(7)
    assert watch.killed(7)  # asked again
    assert not watch.killed(8)
    watch.close()


def test_a_system_without_accounts(tmp_path: Path) -> None:
    watch = OomWatch(tmp_path)
    watch.follow(7)
    assert not watch.killed(7)
    watch.close()


def test_the_kernels_log_names_all_it_has_killed(root: Path) -> None:
    watch = OomWatch(root)
    with (root / "dev/kmsg").open("a") as log:
        log.write("3,1,1,-;Memory cgroup out of memory: Killed process 8 (python) total-vm:1kB\n")
        log.write("3,1,2,-;Out of memory: Killed process 7 (python) total-vm:1kB\n")
    assert watch.killed(7)
    assert watch.killed(8)  # though it came before
    assert watch.killed(7)
    assert not watch.killed(78)
    watch.close()


def test_what_was_logged_before_is_ignored(root: Path) -> None:
    (root / "dev/kmsg").write_text("3,1,1,-;Out of memory: Killed process 7 (python)\n")
    watch = OomWatch(root)
    assert not watch.killed(7)
    watch.close()
