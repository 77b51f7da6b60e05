"""Write output files atomically, and find the free space on a disk. No torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp

from framework.errors import ConfigError, RunError


def checked_output(text: str, *, key: str, suffixes: Collection[str]) -> Path:
    """Return the absolute path that `key`=`text` means. Raises ConfigError if it exists or can't be written."""
    output = Path(text).expanduser().absolute()
    if output.suffix not in suffixes:
        raise ConfigError(f"{key}={output.name}: must end with {' or '.join(suffixes)}.")
    if output.exists() or output.is_symlink():
        raise ConfigError(f"{key}={output} exists already. Choose another name, or remove it.")
    if not output.parent.is_dir():
        raise ConfigError(f"{key}={output}: the folder {output.parent} does not exist. Create it, or choose another.")
    if not os.access(output.parent, os.W_OK):
        raise ConfigError(f"{key}={output}: the folder is not writable. Choose another.")
    return output


@contextmanager
def atomic_output(output: Path, *, key: str) -> Iterator[Path]:
    """Yield a path to write the file to; at the end it is flushed to the disk and gets its name.

    That path is in a hidden folder beside `output`, for libraries that write more than one file on the way. Whatever
    ends the block, the folder is removed. Raises RunError if the disk refuses, ConfigError if `output` exists by then.
    """
    with _disk_errors(output, key=key):
        folder = Path(mkdtemp(prefix=f".{output.name}.", suffix=".tmp", dir=output.parent))
    temporary = folder / output.name
    try:
        yield temporary
        with _disk_errors(output, key=key):
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            try:
                os.link(temporary, output)  # unlike renaming, fails if the name is taken
            except FileExistsError:
                raise ConfigError(f"{key}={output} was created by another command, and is left as it is.") from None
            except OSError:  # a file system without links
                temporary.replace(output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def free_bytes(folder: Path) -> int | None:
    """Return the free bytes of the file system of `folder`, which need not exist yet. User quotas are not visible.

    None if that isn't known: some network file systems report no size.
    """
    existing = folder.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    facts = os.statvfs(existing)
    return facts.f_bavail * facts.f_frsize if facts.f_blocks else None


@contextmanager
def _disk_errors(output: Path, *, key: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(f"{key}={output} can't be written: {error.strerror or error}. Choose another folder.") from error
