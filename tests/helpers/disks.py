"""Disks that are full, or soon will be."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path) -> Iterator[Callable[[int], Path]]:
    """Gives what puts a file system of so many KiB at `folder`, which must not be there yet; skips where none may."""

    def mount(size_kib: int) -> Path:
        folder.mkdir()
        options = ["-o", f"size={size_kib}k"]
        made = subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", folder], capture_output=True, text=True)
        if made.returncode != 0:
            pytest.skip(f"a full disk needs the right to mount one: {made.stderr.strip()}")
        return folder

    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("a full disk needs the right to mount one")
    try:
        yield mount
    finally:
        subprocess.run(["umount", folder], check=folder.is_mount())


@contextmanager
def full_at(size_bytes: int) -> Iterator[None]:
    """Files take no more than so many bytes; of what goes beyond it they take the beginning, as a full disk does."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
