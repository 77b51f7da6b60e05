"""Write output files atomically, and find the free space on a disk. No torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from framework.errors import ConfigError, RunError


def checked_output(text: str, *, key: str, suffixes: Collection[str]) -> Path:
    """Return the absolute path that `key`=`text` means. Raises ConfigError if it exists or can't be written.

    suffixes: it has one of them; empty for a folder.
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
            for each in (temporary, *temporary.rglob("*")):
                if each.is_file():
                    with each.open("rb") as file:
                        os.fsync(file.fileno())
            temporary.replace(output)


def free_bytes(folder: Path) -> int | None:
    """Return the free bytes of the file system of `folder`, which need not exist yet. User quotas are not visible.

    None if that isn't known: some network file systems report no size.
    """
    folder = folder.absolute()
    usage = shutil.disk_usage(next(place for place in (folder, *folder.parents) if place.exists()))
    return usage.free if usage.total else None


@contextmanager
def _disk_errors(output: Path, *, key: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(f"{key}={output} can't be written: {error.strerror or error}. Choose another folder.") from error
