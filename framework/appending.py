"""Appending to a file in whole pieces, on a disk that may be full for a while. No torch."""

from __future__ import annotations

import logging
import os
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import final

_KEPT_BYTES = 16 << 20
_log = logging.getLogger(__name__)


@final
class Appender:
    """A file that lines or records are appended to, each whole or not at all; with the kernel at once.

    A disk that refuses ends nothing: that is told once, in the log and on the terminal, and what it didn't take waits
    in memory (up to 16 MiB; the oldest is lost first) and is written before the next piece once there is room. Only
    one process at a time may append.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._lost = 0
        self._is_refused = False
        self._write_waiting()

    def write(self, piece: bytes) -> None:
        """Append `piece`, after what waits."""
        self._waiting.append(piece)
        self._waiting_bytes += len(piece)
        self._write_waiting()
        while self._waiting_bytes > _KEPT_BYTES:
            self._waiting_bytes -= len(self._waiting.popleft())
            self._lost += 1

    def flush(self) -> None:
        """Nothing that `write` hasn't done, but for what waits."""
        self._write_waiting()

    def close(self) -> None:
        """Try once more to write what waits; calling it again is fine."""
        self._write_waiting()
        self._lost += len(self._waiting)
        self._waiting.clear()
        self._waiting_bytes = 0
        if self._lost:
            _tell(f"{self._path} lacks {self._lost} entries that the disk didn't take")
            self._lost = 0
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _write_waiting(self) -> None:
        try:
            if self._descriptor is None:
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            while self._waiting:
                _append(self._descriptor, self._waiting[0])
                self._waiting_bytes -= len(self._waiting.popleft())
        except OSError as error:
            if not self._is_refused:
                self._is_refused = True
                _tell(f"{self._path} can't be written: {error.strerror or error}. It waits in memory; training goes on")
            return
        if self._is_refused:
            self._is_refused = False
            _tell(f"{self._path} is written again")


def _append(descriptor: int, piece: bytes) -> None:
    """All of it, or nothing and OSError: a full disk takes a part first."""
    size_bytes = os.fstat(descriptor).st_size
    try:
        written = os.write(descriptor, piece)
        while written < len(piece):
            written += os.write(descriptor, piece[written:])
    except OSError:
        os.ftruncate(descriptor, size_bytes)
        raise


def _tell(text: str) -> None:
    _log.warning(text)
    with suppress(OSError):  # of a standard output that lies on the same disk
        print(text, flush=True)
