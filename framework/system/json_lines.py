"""Files of one JSON object per line, each with its `step`: appended to, cut back on resume, read. No torch."""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, final

from framework.system.run_dir import write_atomically

_MAX_PENDING_ROWS = 100_000
_encode = json.JSONEncoder(allow_nan=False).encode  # made once: `json.dumps` makes one at each call
_log = logging.getLogger(__name__)


@final
class JsonLines:
    """A file to append rows to. Each row reaches the kernel at once, whole or not at all.

    A disk that refuses is reported once, in the log and on the terminal. Rows then wait in memory, up to 100,000 (the
    oldest is dropped first), and are written before the next row once there is room. One process at a time may append.
    """

    def __init__(self, path: Path, *, last_step: int | None) -> None:
        """Cut off rows after `last_step` (None keeps all), and a line that a kill left unfinished."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            text = path.read_text(errors="replace")
            kept = "".join(line for line, row in _rows(text) if last_step is None or row["step"] <= last_step)
            if kept != text:
                write_atomically(path, kept)
        self._path = path
        self._file: FileIO | None = None
        self._pending: deque[bytes] = deque(maxlen=_MAX_PENDING_ROWS)
        self._is_refused = False
        self.flush()

    def write(self, row: Mapping[str, Any]) -> None:
        """Append `row`. Raises ValueError for a number that is not finite, which JSON doesn't have."""
        self._pending.append(f"{_encode(row)}\n".encode())
        self.flush()

    def flush(self) -> None:
        """Write the pending rows, among them those that the disk refused."""
        try:
            if self._file is None:
                self._file = self._path.open("ab", buffering=0)
            while self._pending:
                _append(self._file, self._pending[0])
                self._pending.popleft()
        except OSError as error:
            if not self._is_refused:
                report(f"{self._path} can't be written: {error.strerror or error}. Its rows wait in memory")
            self._is_refused = True
            return
        if self._is_refused:
            report(f"{self._path} is written again")
        self._is_refused = False

    def close(self) -> None:
        """Write what is pending and close the file; calling it again is fine."""
        if self._pending:
            self.flush()
        if self._pending:
            report(f"{self._path} lacks {len(self._pending)} rows that the disk refused")
            self._pending.clear()
        if self._file is not None:
            self._file.close()
            self._file = None


def report(text: str) -> None:
    """Write to the log and the terminal that a disk refuses or accepts data again."""
    _log.warning(text)
    with suppress(OSError):  # standard output may be on the same disk
        print(text, flush=True)


def _append(file: FileIO, line: bytes) -> None:
    """Write all of it, or nothing and raise OSError: a full disk takes a part first."""
    size_bytes = os.fstat(file.fileno()).st_size
    try:
        written = file.write(line)
        while written < len(line):
            written += file.write(line[written:])
    except OSError:
        file.truncate(size_bytes)
        raise


def _rows(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n"):
            return
        try:
            row = json.loads(line)
            int(row["step"])
        except (ValueError, TypeError, KeyError):
            continue
        yield line, row
