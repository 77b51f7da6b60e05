"""End the processes that descendants of this process leave behind, in whatever session they are."""

from __future__ import annotations

import ctypes
import os
import shlex
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from framework.system.shown_text import shown

if TYPE_CHECKING:
    import psutil

# A number of prctl(2).
_PR_SET_CHILD_SUBREAPER = 36

# Before SIGTERM, for processes that are about to end by themselves, such as Python's resource tracker.
_GRACE_S = 0.5
# From SIGTERM to SIGKILL: W&B's service uploads in this time.
_TERMINATE_S = 10.0
# After SIGKILL. Only a process in an uninterruptible system call, or another user's, outlives it for so long.
_KILL_S = 10.0
_POLL_S = 0.02

# Characters of a command in a message.
_MAX_CHARS = 80

ENDS_WITH_OTHERS = "FRAMEWORK_ENDS_WITH_OTHERS"
"""Environment variable of a helper process of the framework, which ends by itself once its pipe is closed."""
ENDS_WITHIN_S = _GRACE_S + _TERMINATE_S + _KILL_S + 5.0
"""The longest time that `end_descendants` takes."""


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends. Not inherited by fork(); Linux only."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def end_descendants() -> list[str]:
    """End and reap all descendants, by SIGTERM and ten seconds later by SIGKILL; return descriptions of them.

    Processes that end by themselves within half a second aren't named. If there are none, this costs a system call.
    """
    # Imported here, to keep it out of the start of a fork server.
    import psutil

    descriptions: dict[psutil.Process, str] = {}
    began_s = time.monotonic()
    while _reap() and time.monotonic() < began_s + _GRACE_S + _TERMINATE_S + _KILL_S:
        passed_s = time.monotonic() - began_s
        descendants: list[psutil.Process] = []
        if passed_s > _GRACE_S:
            descendants = psutil.Process().children(recursive=True)
        for process in descendants:
            # It may have ended in the meantime, or be another user's.
            with suppress(psutil.Error):
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                ends_by_itself = ENDS_WITH_OTHERS in process.environ()
                if process not in descriptions and not ends_by_itself:
                    descriptions[process] = _described(process)
                    process.terminate()
                if passed_s > _GRACE_S + _TERMINATE_S:
                    process.kill()
        time.sleep(_POLL_S)
    return list(descriptions.values())


def left_behind(processes: list[str]) -> str:
    """Return the line of a message that names these processes."""
    return f"Left behind by the ranks, and ended: {', '.join(processes)}"


def _reap() -> bool:
    """Reap the children that have ended; return True if there are others."""
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        return False
    return True


def _described(process: psutil.Process) -> str:
    command = process.cmdline()
    # A rank was forked, and its children too, if they didn't run another program.
    if any("framework.launch.fork_server" in word for word in command):
        return f"pid {process.pid} (a fork of a rank)"
    text = shown(shlex.join(command) or process.name())
    if len(text) > _MAX_CHARS:
        text = f"{text[:_MAX_CHARS]}…"
    return f"pid {process.pid} ({text})"
