"""What the children of the fork server's tests run."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

LONG_S = 120.0


def leave_with(arguments: dict[str, Any], _fd: int | None) -> int:
    status: int = arguments["status"]
    return status


def fail(_arguments: dict[str, Any], _fd: int | None) -> int:
    raise ValueError("a mistake in the child")


def exit_early(arguments: dict[str, Any], _fd: int | None) -> int:
    sys.exit(arguments["code"])


def kill_itself(_arguments: dict[str, Any], _fd: int | None) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def wait_long(arguments: dict[str, Any], _fd: int | None) -> int:
    """Say so, and wait to be ended."""
    if arguments.get("stubborn"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(arguments["ready"]).write_text(str(os.getpid()))
    time.sleep(LONG_S)
    return 0


def write_to_fd(_arguments: dict[str, Any], fd: int | None) -> int:
    assert fd is not None
    with os.fdopen(fd, "w") as file:
        file.write("hello")
    return 0


def describe(arguments: dict[str, Any], fd: int | None) -> int:
    """Leave what this process sees of itself in a file."""
    seen = {
        "fd": fd,
        "cwd": str(Path.cwd()),
        "argv": sys.argv,
        "environment": dict(os.environ),
        "stdin": sys.stdin.read() if arguments.get("read_stdin") else None,
        "wakeup_fd": signal.set_wakeup_fd(-1),
        "sigchld": signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL,
        "parent": os.getppid(),
        "sockets": [link for link in _open_links() if link.startswith("socket:")],
    }
    Path(arguments["file"]).write_text(json.dumps(seen))
    return 0


def _open_links() -> list[str]:
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(entry.readlink()))
        except OSError:  # the one that lists the folder
            continue
    return links


def say(_arguments: dict[str, Any], _fd: int | None) -> int:
    """Through Python and through a descriptor, without flushing."""
    sys.stdout.write("unflushed")
    os.write(2, b"from a descriptor\n")
    return 0
