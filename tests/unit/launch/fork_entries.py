"""What the children of the fork server's tests run."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import tempfile
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


def see_folders(arguments: dict[str, Any]) -> int:
    """Return 0 if the folder of a preloaded library is there; note it, and one of this child's own."""
    own = tempfile.TemporaryDirectory(dir=arguments["place"])
    library = importlib.import_module("keeps_folder")
    Path(arguments["seen"]).write_text(f"{library.FOLDER.name}\n{own.name}\n")
    # It lives until the child's exit.
    sys.modules["own_folder"] = own  # type: ignore[assignment]
    return 0 if Path(library.FOLDER.name).is_dir() else 1
