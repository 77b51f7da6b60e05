"""Folders for caches and locks that only this user can write. No torch."""

from __future__ import annotations

import grp
import os
import pwd
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

_ACL = "system.posix_acl_access"


def user_cache() -> Path:
    """Return the folder of this user's caches: `framework` in XDG_CACHE_HOME, or in ~/.cache."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return caches.absolute() / "framework"


def private_places(name: str) -> tuple[Path, Path]:
    """Return where a private folder of this name may be: in the user's cache, or else a temporary one."""
    return user_cache() / name, Path(tempfile.gettempdir(), f"framework_{name}_{os.getuid()}")


def private_folders(name: str) -> Iterator[Path]:
    """Yield those of `private_places` that exist or can be made, with mode 0700, and that nobody else can write.

    Nobody else can replace them either: a parent that others can write must have the sticky bit, as /tmp has.
    """
    for folder in private_places(name):
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if _is_private(folder):
                yield folder


def _is_private(folder: Path) -> bool:
    status = folder.lstat()
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if not is_own or status.st_mode & 0o022 or not os.access(folder, os.W_OK):
        return False
    return not any(_others_can_rename_in(parent) for parent in folder.resolve().parents)


def _others_can_rename_in(folder: Path) -> bool:
    status = folder.stat()
    if status.st_mode & stat.S_ISVTX:
        return False
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not is_own_group(folder, status.st_gid)


def is_own_group(file: Path, gid: int) -> bool:
    """Return True if a group has only you: Debian and Fedora give everybody one, and let it write all their files."""
    # An ACL shows its mask as the group's rights.
    return _has_only_me(gid) and _ACL not in os.listxattr(file)


@cache
def _has_only_me(gid: int) -> bool:
    try:
        me = pwd.getpwuid(os.geteuid())
        group = grp.getgrgid(gid)
    except KeyError:
        # As in a container that knows no such user.
        return False
    # The name as well, since a directory service needn't list all who have the group.
    if me.pw_gid != gid or group.gr_name != me.pw_name:
        return False
    others = [user for user in pwd.getpwall() if user.pw_gid == gid and user.pw_uid != me.pw_uid]
    return not others and not set(group.gr_mem) - {me.pw_name}
