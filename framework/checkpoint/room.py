"""Room on the disk for checkpoints. No torch."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def free_bytes(folder: Path) -> int | None:
    """What may still be written to the file system that `folder` lies on, or will lie on once it is made.

    None where that isn't known: some network file systems tell no size. A user's quota isn't in it.
    """
    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    facts = os.statvfs(place)
    return facts.f_bavail * facts.f_frsize if facts.f_blocks else None


def require_room(folder: Path, needed_bytes: int) -> None:
    """Raise the OSError of a full disk (ENOSPC) where fewer than `needed_bytes` are free for `folder`, with both."""
    free = free_bytes(folder)
    if free is not None and free < needed_bytes:
        numbers = f"{in_megabytes(needed_bytes)} needed, {in_megabytes(free)} free"
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({numbers})", str(folder))


def in_megabytes(size_bytes: int) -> str:
    """In millions of bytes, as a person reads it: "1.5 MB"."""
    return f"{size_bytes / 1e6:,.{2 if size_bytes < 1e7 else 0}f} MB"
