"""The command, in a Python without what only Linux has: `python -m tests.helpers.without_linux recipe=toy …`.

Functions and constants are removed from the standard library, `prctl` and others from the C library, `/proc` and
`/dev/shm` are hidden from all but psutil, and sys.platform is macOS's.
"""

from __future__ import annotations

import builtins
import ctypes
import fcntl
import io
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

# These choose their own code by sys.platform when they are imported, and have it for macOS, too.
import psutil  # noqa: F401
import torch  # noqa: F401

_LINUX_ONLY: dict[ModuleType, tuple[str, ...]] = {
    os: (
        "O_DIRECT",
        "O_PATH",
        "copy_file_range",
        "eventfd",
        "fdatasync",
        "getrandom",
        "getresuid",
        "getxattr",
        "listxattr",
        "memfd_create",
        "pidfd_open",
        "pipe2",
        "posix_fadvise",
        "posix_fallocate",
        "sched_getaffinity",
        "sched_setaffinity",
        "setxattr",
        "splice",
    ),
    signal: (
        "SIGPOLL",
        "SIGPWR",
        "SIGRTMAX",
        "SIGRTMIN",
        "SIGSTKFLT",
        "pidfd_send_signal",
        "sigtimedwait",
        "sigwaitinfo",
    ),
    select: ("epoll",),
    socket: ("AF_NETLINK", "MSG_CMSG_CLOEXEC", "SOCK_CLOEXEC", "SOCK_NONBLOCK", "SO_PEERCRED"),
    time: ("CLOCK_BOOTTIME",),
    fcntl: ("F_ADD_SEALS", "F_SETPIPE_SZ"),
}
_GLIBC_ONLY = ("gettid", "mallopt", "malloc_trim", "prctl", "tgkill")
_HIDDEN = ("/proc", "/sys", "/dev/shm")


class _OtherLibrary:
    """The C library without what is only in Linux's."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        if name in _GLIBC_ONLY:
            raise AttributeError(name)
        return getattr(self._library, name)


def _remove_linux() -> None:
    for module, names in _LINUX_ONLY.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)

    builtins.open = io.open = _without_proc(io.open)
    for name in ("open", "stat", "readlink", "listdir"):
        setattr(os, name, _without_proc(getattr(os, name)))

    library_of = ctypes.CDLL

    def other_library(name: str | None = None, *args: Any, **options: Any) -> Any:
        library = library_of(name, *args, **options)
        return _OtherLibrary(library) if name is None else library

    ctypes.CDLL = other_library  # type: ignore[assignment,misc]
    sys.platform = "darwin"


def _without_proc(function: Callable[..., Any]) -> Callable[..., Any]:
    def refusing(path: Any, *args: Any, **options: Any) -> Any:
        if isinstance(path, (str, os.PathLike)) and str(path).startswith(_HIDDEN) and not _is_for_psutil():
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return function(path, *args, **options)

    return refusing


def _is_for_psutil() -> bool:
    frame: Any = sys._getframe()
    while frame is not None:
        if "psutil" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


if __name__ == "__main__":
    _remove_linux()
    from framework.__main__ import main

    sys.exit(main())
