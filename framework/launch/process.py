"""A process of this machine that isn't ours to wait for: whether it lives, and signals that reach no other."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import final

STOPPED = ("T", "t")
_ENDED = ("", "Z", "X")


@final
class Process:
    """One process, from when it is first seen. Numbers are used again by the kernel; this one stays that process.

    Without pidfd (Linux before 5.3, Pythons built for such) its time of birth has to tell it from a later one.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._born = _stat(pid, _BORN)
        self._fd: int | None = None
        with suppress(OSError, AttributeError):  # it has ended already, or there is no pidfd
            self._fd = os.pidfd_open(pid)

    def is_alive(self) -> bool:
        """Whether it has not ended; a zombie has."""
        return state_of(self._pid) not in _ENDED and self._is_same()

    def send(self, signal_number: int) -> None:
        """Raises ProcessLookupError where it has ended."""
        if self._fd is not None:
            signal.pidfd_send_signal(self._fd, signal_number)
        elif self._is_same():
            os.kill(self._pid, signal_number)
        else:
            raise ProcessLookupError

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _is_same(self) -> bool:
        return self._born != "" and _stat(self._pid, _BORN) == self._born


def state_of(pid: int) -> str:
    """The kernel's letter for what a process is doing; empty where there is none."""
    return _stat(pid, _STATE)


_STATE, _BORN = 0, 19  # columns of /proc/PID/stat after the name, which may have blanks


def _stat(pid: int, column: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[column]
    except (OSError, IndexError):
        return ""
