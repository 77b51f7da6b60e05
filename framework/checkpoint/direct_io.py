"""Write a file with its checksum, from beginning to end, past the page cache if the file system allows it.

A checkpoint isn't read again soon, and copying it into the page cache keeps a core busy that training could use.
O_DIRECT hands the data to the disk as it is in memory, where it must begin at a multiple of BLOCK_BYTES, as in the
file; other data goes through a small buffer. Without O_DIRECT (tmpfs, some network file systems, macOS) it is written
as usual.
"""

from __future__ import annotations

import errno
import mmap
import os
import zlib
from pathlib import Path
from types import TracebackType
from typing import final

import numpy as np

from framework.checkpoint.layout import FileFacts

BLOCK_BYTES = 4096
"""The alignment for O_DIRECT; 512 would do on many disks."""

_BUFFER_BYTES = 1 << 20
_CHUNK_BYTES = 8 << 20  # checksummed, then written, at once
_DIRECT = getattr(os, "O_DIRECT", 0)


@final
class ChecksummedFile:
    """A new file with the CRC-32 of what is written to it; a context manager that closes it.

    An error of the disk is kept until `finish`, since `torch.save` would raise it as another one.
    """

    def __init__(self, path: Path) -> None:
        self._is_direct = _DIRECT != 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            self._descriptor = os.open(path, flags | _DIRECT, 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._is_direct = False
            self._descriptor = os.open(path, flags, 0o666)
        self._buffer = mmap.mmap(-1, _BUFFER_BYTES)  # mapped memory is aligned
        self._filled = 0
        self._written = 0  # to the file; the buffer comes after it
        self._error: OSError | None = None
        self._crc32 = 0

    def __enter__(self) -> ChecksummedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        if self._error is None:
            try:
                for begin in range(0, len(view), _CHUNK_BYTES):
                    self._append(view[begin : begin + _CHUNK_BYTES])
            except OSError as error:
                self._error = error
        return len(view)

    def tell(self) -> int:
        return self._written + self._filled

    def flush(self) -> None:
        """Do nothing: `finish` flushes."""

    close = flush  # DCP calls it before the file is finished

    def finish(self) -> FileFacts:
        """Flush to the disk and return the file's facts. Raises the first OSError there was."""
        if self._error is not None:
            raise self._error
        self._put(memoryview(self._buffer)[: self._filled])
        self._filled = 0
        os.fsync(self._descriptor)
        return FileFacts(size_bytes=self._written, crc32=f"{self._crc32:08x}")

    def _append(self, view: memoryview) -> None:
        self._crc32 = zlib.crc32(view, self._crc32)
        if self._filled == 0 and np.frombuffer(view, dtype=np.uint8).ctypes.data % BLOCK_BYTES == 0:
            whole = len(view) // BLOCK_BYTES * BLOCK_BYTES
            self._put(view[:whole])
            view = view[whole:]
        while len(view):
            part = view[: _BUFFER_BYTES - self._filled]
            self._buffer[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            view = view[len(part) :]
            # Also at the end of a block, so that aligned data that follows needs no copy.
            if self._filled % BLOCK_BYTES == 0 and (self._filled == _BUFFER_BYTES or not len(view)):
                self._put(memoryview(self._buffer)[: self._filled])
                self._filled = 0

    def _put(self, view: memoryview) -> None:
        while len(view):
            # The end of the file, and what is left of a write that a full disk cut short.
            if self._is_direct and len(view) % BLOCK_BYTES:
                self._write_as_usual()
            try:
                done = os.pwrite(self._descriptor, view, self._written)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._is_direct:
                    raise
                self._write_as_usual()
                continue
            self._written += done
            view = view[done:]

    def _write_as_usual(self) -> None:
        import fcntl  # nothing that has O_DIRECT lacks it

        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & ~_DIRECT)
        self._is_direct = False
