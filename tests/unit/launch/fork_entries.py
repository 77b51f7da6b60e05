"""What the children of the fork server's tests run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def end(arguments: dict[str, Any]) -> None:
    """End without a status."""
    print("printed", end="")
    os.write(2, b"from a descriptor\n")
    if arguments["how"] == "raise":
        raise ValueError("a mistake in the child")
    if arguments["how"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(arguments["how"])


def wait_long(arguments: dict[str, Any]) -> int:
    """Say so, and wait to be killed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(arguments["ready"] + ".tmp").write_text(str(os.getpid()))
    Path(arguments["ready"] + ".tmp").rename(arguments["ready"])
    time.sleep(120.0)
    return 0


def leave_behind(arguments: dict[str, Any]) -> int:
    """End before a process that this one has started."""
    process = subprocess.Popen(["sleep", "120"])
    Path(arguments["started"]).write_text(str(process.pid))
    return 0
