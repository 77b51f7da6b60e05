"""A file written once, from its beginning to its end, past the page cache where the file system lets us.

A checkpoint isn't read again soon, and to copy it into the page cache keeps a core busy that training could use.
O_DIRECT hands the data to the disk as it lies there: it has to begin at a multiple of BLOCK_BYTES, in memory and in the
file. What doesn't goes through a small buffer that does. Where O_DIRECT isn't known (tmpfs, some network file systems,
macOS) the same is written as usual.
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

from framework.checkpoint.format import FileFacts

BLOCK_BYTES = 4096
"""What O_DIRECT wants everything to be a multiple of; 512 would do on many disks."""

_BUFFER_BYTES = 1 << 20
_CHUNK_BYTES = 8 << 20  # at once: summed up, then written
_DIRECT = getattr(os, "O_DIRECT", 0)


@final
class ChecksummedFile:
    """A new file that sums up what is written to it; a context manager that closes it.

    An error of the disk is kept until `finish`: raised inside `torch.save` it would come out as another one. Raises
    OSError where the file can't be made.
    """

    def __init__(self, path: Path) -> None:
        self._is_direct, self._descriptor = _opened(path)
        self._buffer = mmap.mmap(-1, _BUFFER_BYTES)  # aligned, as all that is mapped
        self._filled = 0
        self._written = 0  # to the file; what the buffer holds comes behind it
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
                    self._take(view[begin : begin + _CHUNK_BYTES])
            except OSError as error:
                self._error = error
        return len(view)

    def flush(self) -> None:
        """Nothing yet: `torch.save` calls it, `finish` does it."""

    def finish(self) -> FileFacts:
        """Flush to the disk. Raises the first OSError there was."""
        if self._error is not None:
            raise self._error
        size_bytes = self._written + self._filled
        if self._filled:
            whole = -(-self._filled // BLOCK_BYTES) * BLOCK_BYTES if self._is_direct else self._filled
            self._put(memoryview(self._buffer)[:whole])
            os.ftruncate(self._descriptor, size_bytes)
        os.fsync(self._descriptor)
        return FileFacts(size_bytes=size_bytes, crc32=f"{self._crc32:08x}")

    def _take(self, view: memoryview) -> None:
        self._crc32 = zlib.crc32(view, self._crc32)
        if self._filled == 0 and _is_aligned(view):
            whole = len(view) // BLOCK_BYTES * BLOCK_BYTES
            self._put(view[:whole])
            view = view[whole:]
        while len(view):
            part = view[: _BUFFER_BYTES - self._filled]
            self._buffer[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            view = view[len(part) :]
            # Also at the end of a block, so that what follows and is aligned needs no copy.
            if self._filled % BLOCK_BYTES == 0 and (self._filled == _BUFFER_BYTES or not len(view)):
                self._put(memoryview(self._buffer)[: self._filled])
                self._filled = 0

    def _put(self, view: memoryview) -> None:
        while len(view):
            try:
                done = os.pwrite(self._descriptor, view, self._written)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._is_direct:
                    raise
                self._is_direct = False
                _write_as_usual(self._descriptor)
                continue
            self._written += done
            view = view[done:]
            if self._is_direct and done % BLOCK_BYTES:  # the disk is about to be full: the next try says so
                self._is_direct = False
                _write_as_usual(self._descriptor)


def _opened(path: Path) -> tuple[bool, int]:
    """Whether it is written past the page cache, and the descriptor."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    if _DIRECT:
        try:
            return True, os.open(path, flags | _DIRECT, 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return False, os.open(path, flags, 0o666)


def _write_as_usual(descriptor: int) -> None:
    import fcntl  # nothing that has O_DIRECT lacks it

    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~_DIRECT)


def _is_aligned(view: memoryview) -> bool:
    """Whether it begins at a multiple of BLOCK_BYTES in memory, and has at least one block."""
    if len(view) < BLOCK_BYTES:
        return False
    address: int = np.frombuffer(view, dtype=np.uint8).ctypes.data
    return address % BLOCK_BYTES == 0
