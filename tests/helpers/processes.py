"""Finding every process that a test started, whoever its parent is by now.

A variable in the environment marks them: it is inherited by every descendant, and the kernel keeps showing the
environment a process was started with, so an orphan is found as well as a child. A fork without exec of the test's own
process shows the environment pytest was started with, and is found as a child only.
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil

MARK = "FRAMEWORK_TEST_ID"
LONG_LIVED: set[int | None] = set()
"""Process ids of what lives as long as the tests do, by design."""

_POLL_S = 0.02
_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system"}
_started = 0

Found = TypeVar("Found")


def _count(event: str, _arguments: object) -> None:
    global _started
    _started += event in _STARTS


sys.addaudithook(_count)


def num_started() -> int:
    """How often this process has started another one so far."""
    return _started


def new_mark() -> str:
    """A value of the variable that no other test has; inside a marked test it begins with that test's own."""
    own = uuid.uuid4().hex
    outer = os.environ.get(MARK)
    return f"{outer}.{own}" if outer else own


def marked(mark: str) -> list[psutil.Process]:
    """Every living process whose mark begins with this one, except the calling process. Zombies have no environment."""
    needle = f"{MARK}={mark}".encode()
    pids = []
    for pid in (int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()):
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            # The process is another user's, or gone.
            continue
        if any(variable.startswith(needle) for variable in environment.split(b"\0")):
            pids.append(pid)
    return _alive(pid for pid in pids if pid != os.getpid())


def _alive(pids: Iterable[int]) -> list[psutil.Process]:
    processes = []
    for pid in pids:
        try:
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
        except psutil.NoSuchProcess:
            continue
    return processes


def children() -> list[psutil.Process]:
    """Every descendant of this process, zombies too: nobody waited for those."""
    found: list[psutil.Process] = []
    pids = _children_on_linux(os.getpid())
    while pids:
        pid = pids.pop()
        pids += _children_on_linux(pid)
        with suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found


def _children_on_linux(pid: int) -> list[int]:
    """Return the children of one process, in a tenth of psutil's time, which reads the state of every process."""
    found: list[int] = []
    with suppress(OSError):
        # The process may have ended.
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, Path(task, "children").read_text().split())
    return found


def describe(process: psutil.Process) -> str:
    """One line: pid, parent, state and command."""
    try:
        with process.oneshot():
            command = " ".join(process.cmdline()) or process.name()
            return f"pid {process.pid} (parent {process.ppid()}, {process.status()}): {command}"
    except psutil.Error:
        return f"pid {process.pid} (gone by now)"


def settle(find: Callable[[], list[Found]], *, within_s: float) -> list[Found]:
    """What `find` still finds when the time is over; returns as soon as it finds nothing."""
    deadline = time.monotonic() + within_s
    while (found := find()) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return found


def kill_all(processes: Iterable[psutil.Process], *, within_s: float = 5.0) -> None:
    """SIGKILL, and wait until they are gone (children are reaped)."""
    processes = list(processes)
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=within_s)
