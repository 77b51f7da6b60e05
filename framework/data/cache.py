"""Tensors that take time to make, kept in a file: made by one process, mapped into the memory of all.

A file begins with a line of JSON: its key, and for each tensor the type, the shape, the offset and the CRC-32 of its
bytes, which follow, each aligned; and the CRC-32 of all that. It gets its name when it is complete.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import logging
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

LOCK_SUFFIX = ".lock"
SUFFIX = ".tensors"

_FORMAT = 2
_ALIGNMENT_BYTES = 64
_MOST_HEADER_BYTES = 1 << 16
_CHUNK_BYTES = 1 << 20
_WAIT_S = 600.0  # for another process that makes them; then this one does so for itself
_POLL_S = 0.1

_log = logging.getLogger("framework")


class _UnusableError(Exception):
    """A cache that can't be used; the text says why, as the end of a sentence that begins with its name."""


def cached_tensors(folder: str | Path, name: str, *, key: str, make: Callable[[], Sequence[Tensor]]) -> list[Tensor]:
    """What `make` gives, from `<folder>/<name>.tensors` where that was made with the same `key`.

    key: whatever the tensors depend on, such as checksums of files and a version. make: called by one of the processes
    that share the folder, the others wait for it; may be called by each where nothing can be written.
    The tensors are on the CPU and mapped from the file: the processes of a node share their memory, it is read when it
    is used, and what is written to them stays in this process. A file that is damaged, or has another key, is made
    anew, and the log says so. Passes what `make` raises.
    """
    file = Path(folder).expanduser().absolute() / f"{name}{SUFFIX}"
    with suppress(_UnusableError, OSError):  # told by the one that makes it anew
        return _opened(file, key=key)
    try:
        sys.audit("framework.keep", str(file))
    except PermissionError:  # of who has forbidden it in this process (`sys.addaudithook`)
        return list(make())
    with _held(file) as is_held:
        if not is_held:
            return list(make())
        try:
            return _opened(file, key=key)  # another process may have made it while this one waited
        except (_UnusableError, OSError) as error:
            if not isinstance(error, FileNotFoundError):
                _log.warning("%s %s: it is made anew", file, error)
        made = [tensor.detach().cpu().contiguous() for tensor in make()]
        try:
            _write(file, made, key=key)
            return _opened(file, key=key)
        except (_UnusableError, OSError) as error:
            _log.warning("%s can't be kept: %s", file, error)
            return made


# Reading


def _opened(file: Path, *, key: str) -> list[Tensor]:
    """The tensors of a file. Raises _UnusableError where it isn't as it was written, OSError where it can't be read."""
    with file.open("rb") as source:
        line = source.readline(_MOST_HEADER_BYTES)
        entries = _entries(line, key=key)
        size_bytes = os.fstat(source.fileno()).st_size
        for entry in entries:
            # Read, not mapped: pages that only the check has touched wouldn't count as this process's memory.
            if _checksum(source, entry["offset"], entry["bytes"]) != entry["crc32"]:
                raise _UnusableError("is damaged")
    # A private mapping of a file opened for reading; what is written to it is copied first.
    mapped = torch.from_file(str(file), shared=False, size=size_bytes, dtype=torch.uint8)
    if bytes(mapped[: len(line)].tolist()) != line:
        raise _UnusableError("was replaced while it was read")
    return [_tensor(mapped, entry) for entry in entries]


def _entries(line: bytes, *, key: str) -> list[dict[str, Any]]:
    try:
        header = json.loads(line)
        version, found, entries, checksum = (header[name] for name in ("format", "key", "tensors", "crc32"))
    except (ValueError, KeyError, TypeError) as error:
        raise _UnusableError("is damaged") from error
    if checksum != _checksum_of(entries):
        raise _UnusableError("is damaged")
    if version != _FORMAT or found != key:
        raise _UnusableError("was made from something else")
    return list(entries)


def _checksum_of(entries: Any) -> int:
    return zlib.crc32(json.dumps(entries).encode())


def _checksum(source: IO[bytes], offset: int, size_bytes: int) -> int:
    source.seek(offset)
    crc = 0
    while size_bytes > 0:
        chunk = source.read(min(_CHUNK_BYTES, size_bytes))
        if not chunk:
            raise _UnusableError("is truncated")
        crc = zlib.crc32(chunk, crc)
        size_bytes -= len(chunk)
    return crc


def _tensor(mapped: Tensor, entry: dict[str, Any]) -> Tensor:
    dtype = getattr(torch, entry["dtype"])
    data = mapped[entry["offset"] : entry["offset"] + entry["bytes"]]
    return data.view(dtype).view(entry["shape"])


# Writing: only the holder of the lock


def _write(file: Path, tensors: Sequence[Tensor], *, key: str) -> None:
    for left in file.parent.glob(f".{file.name}.*.tmp"):  # of processes that were killed
        left.unlink(missing_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as out:
            entries = [_entry(tensor) for tensor in tensors]
            line = _header(entries, key=key)
            out.write(line)
            for tensor, entry in zip(tensors, entries, strict=True):
                out.write(bytes(entry["offset"] - out.tell()))
                out.write(_bytes(tensor))
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(file)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _entry(tensor: Tensor) -> dict[str, Any]:
    name = str(tensor.dtype).removeprefix("torch.")
    crc = zlib.crc32(_bytes(tensor))
    return {"dtype": name, "shape": list(tensor.shape), "bytes": tensor.nbytes, "crc32": crc, "offset": 0}


def _header(entries: list[dict[str, Any]], *, key: str) -> bytes:
    """The first line; puts the offsets into the entries. They follow it, so it is made until its length fits."""
    line = b""
    while True:
        offset, before = len(line), line
        for entry in entries:
            entry["offset"] = offset = -(-offset // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            offset += entry["bytes"]
        header = {"format": _FORMAT, "key": key, "tensors": entries, "crc32": _checksum_of(entries)}
        line = json.dumps(header).encode() + b"\n"
        if len(line) == len(before):
            if len(line) > _MOST_HEADER_BYTES:
                raise _UnusableError(f"would begin with {len(line):,} bytes of names")
            return line


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor, which the caller keeps."""
    if tensor.nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


@contextmanager
def _held(file: Path) -> Iterator[bool]:
    """Hold the file's lock; False where the folder can't be written to, or another process holds it for too long.

    The kernel releases it when the holder dies; its file stays, since removing it races.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = file.with_name(f".{file.name}{LOCK_SUFFIX}").open("a")
    except OSError as error:
        _log.info("nothing is kept in %s: %s", file.parent, error.strerror or error)
        yield False
        return
    with lock:
        yield _wait_for(lock, file)


def _wait_for(lock: IO[str], file: Path) -> bool:
    deadline = time.monotonic() + _WAIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                _log.warning("another process has been making %s for %.0f s: this one goes on without", file, _WAIT_S)
                return False
            time.sleep(_POLL_S)
        except OSError as error:  # a file system without locks
            _log.info("nothing is kept in %s: %s", file.parent, error.strerror or error)
            return False
