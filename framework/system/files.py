"""Read files of unknown origin, write output files atomically, find the free space on a disk. No torch."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, final

from framework.errors import ConfigError, RunError

# The same CRC-32 as zlib's, but four times as fast: 13.6 GB/s instead of 3.4 on a core of an Intel Xeon, where xxh3 has
# 10.1. zlib's took half of the CPU time of writing a checkpoint, which training waits for on busy cores.
try:
    from isal.isal_zlib import crc32 as crc32
except ImportError:
    # It has no wheel for this machine.
    from zlib import crc32 as crc32

MAX_RECORD_BYTES = 2**26
"""The largest file that is read as a whole, 64 MiB: far above any record or configuration."""

# Read at once to compute a checksum.
_CHUNK_BYTES = 1 << 20

# Levels of mappings and lists, and entries on one level, of what is parsed.
_MAX_DEPTH = 100
_MAX_ENTRIES = 1_000_000


# Reading. Whatever lies in a run directory may be damaged, or written by somebody else.


def open_regular(path: Path, *, max_bytes: int | None = None) -> BinaryIO:
    """Open a regular file to read its bytes; symlinks are followed. Never waits, as opening a FIFO would.

    Raises OSError if there is no such file, if it is a folder, FIFO, socket or device, and if it is larger than
    `max_bytes`.
    """
    # Before it is opened, because opening a device may already do something.
    _check_regular(path, path.stat(), max_bytes=max_bytes)
    # And once more, because another process may have put something else there since.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    file = os.fdopen(descriptor, "rb")
    try:
        _check_regular(path, os.fstat(descriptor), max_bytes=max_bytes)
    except OSError:
        file.close()
        raise
    return file


def read_bytes(path: Path, *, max_bytes: int = MAX_RECORD_BYTES) -> bytes:
    """Return the content of a regular file. Raises OSError as `open_regular` does."""
    with open_regular(path, max_bytes=max_bytes) as file:
        content = file.read(max_bytes + 1)
    # It has grown, or its file system knows no sizes.
    if len(content) > max_bytes:
        raise _too_large(path, len(content), max_bytes=max_bytes)
    return content


def read_text(path: Path, *, max_bytes: int = MAX_RECORD_BYTES) -> str:
    """Return the text of a regular file. Raises OSError as `open_regular` does, ValueError if it isn't UTF-8."""
    return read_bytes(path, max_bytes=max_bytes).decode()


def read_json(path: Path, *, max_bytes: int = MAX_RECORD_BYTES) -> Any:
    """Return the content of a JSON file. Raises OSError as `open_regular` does, ValueError if it can't be parsed."""
    return parse_json(read_bytes(path, max_bytes=max_bytes))


def parse_json(text: str | bytes, *, allows_nan: bool = True) -> Any:
    """Return what JSON text stands for. Raises ValueError if it isn't JSON, or is nested too deeply.

    allows_nan: take NaN and Infinity, which JSON doesn't have, as Python does.
    """
    # What Python's parser calls for NaN and Infinity; None: its own.
    parse_constant = None if allows_nan else _refuse_constant
    try:
        content = json.loads(text, parse_constant=parse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    check_nesting(content)
    return content


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"JSON has no {name}")


def check_nesting(content: Any) -> None:
    """Raise ValueError for mappings and lists that are nested too deeply, or are too large, to be processed.

    With YAML's aliases, a small text can stand for a huge or infinite value.
    """
    level = [content]
    for _ in range(_MAX_DEPTH):
        below: list[Any] = []
        for value in level:
            if isinstance(value, Mapping):
                below.extend(value.values())
            elif isinstance(value, (list, tuple)):
                below.extend(value)
            if len(below) > _MAX_ENTRIES:
                raise ValueError("it has too many entries")
        if not below:
            return
        level = below
    raise ValueError(f"it is nested more than {_MAX_DEPTH} levels deep")


@final
@dataclass(frozen=True)
class FileFacts:
    """What is recorded of a file when it is written, to find damage later.

    The checksum is CRC-32: it finds all damage of up to 32 bits in a row and misses other damage once in four billion
    times. It is no defence against forgery.
    """

    size_bytes: int
    crc32: str

    @staticmethod
    def of(content: bytes) -> FileFacts:
        return FileFacts(size_bytes=len(content), crc32=f"{crc32(content):08x}")


def content_damage(open_file: Callable[[], BinaryIO], facts: FileFacts, *, thorough: bool = True) -> str | None:
    """Return what is wrong with the content of a file, as a phrase to follow its name.

    Args:
        open_file: opens the file for reading; it must be able to seek.
        facts: recorded when the file was written.
        thorough: read the file and compare its checksum; else only its size is compared.
    """
    try:
        with open_file() as file:
            size_bytes = file.seek(0, os.SEEK_END)
            if size_bytes != facts.size_bytes:
                return f"has {size_bytes} bytes instead of {facts.size_bytes}"
            if thorough and _crc32_of(file) != facts.crc32:
                return "has another checksum than when it was written"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"can't be read ({error.strerror or error})"
    return None


def _crc32_of(file: BinaryIO) -> str:
    checksum = 0
    file.seek(0)
    while chunk := file.read(_CHUNK_BYTES):
        checksum = crc32(chunk, checksum)
    return f"{checksum:08x}"


def _check_regular(path: Path, status: os.stat_result, *, max_bytes: int | None) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it isn't a regular file", str(path))
    if max_bytes is not None and status.st_size > max_bytes:
        raise _too_large(path, status.st_size, max_bytes=max_bytes)


def _too_large(path: Path, size_bytes: int, *, max_bytes: int) -> OSError:
    return OSError(errno.EFBIG, f"it has {size_bytes:,} bytes, and at most {max_bytes:,} are read", str(path))


# Writing


def checked_output(text: str, *, key: str, suffixes: Collection[str]) -> Path:
    """Return the absolute path that `key`=`text` means. Raises ConfigError if it exists or can't be written.

    suffixes: It must have one of these; empty for a folder.
    """
    output = Path(text).expanduser().absolute()
    if suffixes and output.suffix not in suffixes:
        raise ConfigError(f"{key}={output.name}: must end with {' or '.join(suffixes)}.")
    if output.exists() or output.is_symlink():
        raise ConfigError(f"{key}={output} exists already. Choose another name, or remove it.")
    if not os.access(output.parent, os.W_OK):
        raise ConfigError(f"{key}={output}: the folder doesn't exist or isn't writable. Create it, or choose another.")
    return output


@contextmanager
def atomic_output(output: Path, *, key: str) -> Iterator[Path]:
    """Yield a path to write a file, or a folder of files, to; at the end it is flushed to the disk and gets its name.

    That path is in a hidden folder beside `output`, for libraries that write more than one file on the way. Whatever
    ends the block, the folder is removed. Raises RunError if the disk refuses.
    """
    with _disk_errors(output, key=key):
        folder = TemporaryDirectory(
            prefix=f".{output.name}.", suffix=".tmp", dir=output.parent, ignore_cleanup_errors=True
        )
    with folder:
        temporary = Path(folder.name) / output.name
        yield temporary
        with _disk_errors(output, key=key):
            for path in (temporary, *temporary.rglob("*")):
                if path.is_file():
                    with path.open("rb") as file:
                        os.fsync(file.fileno())
            temporary.replace(output)


def free_bytes(folder: Path) -> int | None:
    """Return the free bytes of the file system of `folder`, which need not exist yet. User quotas are not visible.

    None if that isn't known: some network file systems report no size.
    """
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    return usage.free if usage.total else None


@contextmanager
def _disk_errors(output: Path, *, key: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(f"{key}={output} can't be written: {error.strerror or error}. Choose another folder.") from error
