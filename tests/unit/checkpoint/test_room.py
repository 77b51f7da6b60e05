from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from framework.checkpoint.room import free_bytes, in_megabytes, require_room


def test_what_is_free_is_what_the_system_says_also_for_a_folder_to_be_made(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "not" / "yet"):
        free = free_bytes(folder)
        assert free is not None
        assert abs(free - shutil.disk_usage(tmp_path).free) < 1 << 28  # others write, too


def answering(monkeypatch: pytest.MonkeyPatch, *, free: int, blocks: int = 100) -> None:
    facts = SimpleNamespace(f_bavail=free // 512, f_frsize=512, f_blocks=blocks)
    monkeypatch.setattr(os, "statvfs", lambda _: facts)


def test_too_little_is_the_error_of_a_full_disk_with_both_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, free=1_024_000)
    require_room(tmp_path, 1_024_000)
    with pytest.raises(OSError, match=r"\(1\.03 MB needed, 1\.02 MB free\)") as caught:
        require_room(tmp_path, 1_025_001)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path))
    assert str(caught.value.strerror).startswith(os.strerror(errno.ENOSPC))


def test_a_file_system_that_tells_no_size_is_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, free=0, blocks=0)
    assert free_bytes(tmp_path) is None
    require_room(tmp_path, 1 << 60)


def test_numbers_are_readable() -> None:
    assert [in_megabytes(size) for size in (0, 20_000, 5_080_000, 591_250_000, 12_345_678_901)] == [
        "0.00 MB",
        "0.02 MB",
        "5.08 MB",
        "591 MB",
        "12,346 MB",
    ]
