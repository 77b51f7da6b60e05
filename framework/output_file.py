"""One file that a job leaves where the user wants it: whole under its name or not there, and never over another."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp

from framework.errors import ConfigError, RunError


def checked_output(text: str, *, key: str, suffixes: Collection[str]) -> Path:
    """The file that `key`=`text` means, absolute. Raises ConfigError where it can't be written or is there already."""
    output = Path(text).expanduser().absolute()
    if output.suffix not in suffixes:
        raise ConfigError(f"{key}={output.name}: must end with {_one_of(suffixes)}.")
    if output.exists() or output.is_symlink():
        raise ConfigError(f"{key}={output} is there already. Choose another name, or remove it.")
    if not output.parent.is_dir():
        raise ConfigError(f"{key}={output}: there is no folder {output.parent}. Make it, or choose another.")
    if not os.access(output.parent, os.W_OK):
        raise ConfigError(f"{key}={output}: the folder can't be written. Choose another.")
    return output


@contextmanager
def written_aside(output: Path, *, key: str) -> Iterator[Path]:
    """Gives a path to write the file to; at the end it is flushed to the disk and gets its name.

    That path lies in a hidden folder beside `output`, for libraries that write more than one file on the way, and bears
    its name. Whatever ends the block, the hidden folder is removed. Raises RunError where the disk refuses, ConfigError
    where the name was taken meanwhile.
    """
    with _disk_errors(output, key=key):
        folder = Path(mkdtemp(prefix=f".{output.name}.", suffix=".tmp", dir=output.parent))
    try:
        yield folder / output.name
        with _disk_errors(output, key=key):
            with (folder / output.name).open("rb") as file:
                os.fsync(file.fileno())
            put(folder / output.name, output, key=key)
        _flush_folder(output.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # what can't be removed is hidden, and no file of that name


def put(temporary: Path, output: Path, *, key: str) -> None:
    """Give the file its name, unless another command has done so meanwhile. Raises ConfigError then."""
    try:
        os.link(temporary, output)  # fails where the name is taken, as renaming doesn't
    except FileExistsError:
        raise ConfigError(f"{key}={output} was written by another command meanwhile; it was left.") from None
    except OSError:  # a file system without links
        temporary.replace(output)


def _one_of(suffixes: Collection[str]) -> str:
    return f"{'one of ' if len(suffixes) > 1 else ''}{', '.join(suffixes)}"


@contextmanager
def _disk_errors(output: Path, *, key: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(f"{key}={output} can't be written: {error.strerror or error}. Choose another folder.") from error


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # file systems that don't know this for folders; the file itself is flushed
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
