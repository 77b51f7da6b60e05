"""What the children of the fork server's tests run."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


def leave_with(arguments: dict[str, Any], _fd: int | None) -> int:
    status: int = arguments["status"]
    return status


def end(arguments: dict[str, Any], fd: int | None) -> int:
    """Without giving a status."""
    print("printed", end="")
    os.write(2, b"from a descriptor\n")
    if fd is not None:
        os.write(fd, b"to the descriptor")
    if arguments["how"] == "raise":
        raise ValueError("a mistake in the child")
    if arguments["how"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(arguments["how"])


def wait_long(arguments: dict[str, Any], _fd: int | None) -> int:
    """Say so, and wait to be ended."""
    if arguments.get("stubborn"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(arguments["ready"] + ".tmp").write_text(str(os.getpid()))
    Path(arguments["ready"] + ".tmp").rename(arguments["ready"])
    time.sleep(120.0)
    return 0


def describe(arguments: dict[str, Any], fd: int | None) -> int:
    """Leave what this process sees of itself in a file."""
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        if entry.exists():  # not the one that lists the folder
            links.append(str(entry.readlink()))
    seen = {
        "fd": fd,
        "environment": dict(os.environ),
        "wakeup_fd": signal.set_wakeup_fd(-1),
        "sigchld": signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL,
        "parent": os.getppid(),
        "sockets": [link for link in links if link.startswith("socket:")],
        "modules": sorted(sys.modules),
    }
    Path(arguments["file"]).write_text(json.dumps(seen))
    return 0
