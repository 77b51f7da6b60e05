"""Where the checkpoints of a run are kept. `LocalStorage` is the local disk; another place is one class. No torch."""

from __future__ import annotations

import errno
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from framework.checkpoint.direct_io import DirectFile
from framework.checkpoint.layout import MANIFEST_NAME, Manifest, decode, step_name, step_of
from framework.errors import CheckpointError, DiskError
from framework.system.files import MAX_RECORD_BYTES, content_damage, open_regular

# Writes the content of a file into the binary file that it is given.
WriteContent = Callable[[Any], object]

# Beginnings of the names of directories that are being written, or deleted.
_SAVING = ".saving_"
_DELETED = ".deleted_"
# The only file of a pointer, with the name of a checkpoint.
_POINTER_FILE = "checkpoint"
_NAMES_SHOWN = 8
_NO_MANIFEST = f"it has no {MANIFEST_NAME}"


class CheckpointStorage(ABC):
    """A place for the checkpoints of one run. To use another place, such as S3, write four methods:

        class Bucket(CheckpointStorage):
            def write(self, checkpoint, files): ...
            def read(self, checkpoint, file): ...
            def list(self): ...
            def delete(self, checkpoint): ...

    A checkpoint is a name, such as `step_00001200`, and files. The four methods only move bytes. The framework makes
    the content of the files, checks what it reads against the checksums in the manifest, and decides what is deleted.
    A method raises OSError if the place refuses; a failed save is reported, and training continues.
    """

    # Four methods to write

    @abstractmethod
    def write(self, checkpoint: str, files: Mapping[str, WriteContent]) -> None:
        """Write the files of a checkpoint. One that has this name is replaced.

        Write them one after another, in their order. The manifest is the last file, and its content is only known once
        the others are written: a checkpoint without a manifest counts as incomplete.

        Args:
            files: name → function that writes the content into a binary file; it needs `write` only.
        """

    @abstractmethod
    def read(self, checkpoint: str, file: str) -> BinaryIO:
        """Open a file of a checkpoint for reading; it must be able to seek. Raises FileNotFoundError if it is missing.

        The file may have been damaged or written by somebody else; the framework checks what it reads.
        """

    @abstractmethod
    def list(self) -> Collection[str]:
        """Return the names that were given to `write` and not deleted, complete or not."""

    @abstractmethod
    def delete(self, checkpoint: str) -> None:
        """Delete a checkpoint. After a kill it must be incomplete or undamaged: delete its manifest first."""

    # What has a default, made of these four

    def point(self, pointer: str, checkpoint: str) -> None:
        """Make `pointer`, such as `last`, name a checkpoint."""
        self.write(pointer, {_POINTER_FILE: lambda file: file.write(checkpoint.encode())})

    def pointers(self) -> dict[str, str]:
        """Return all pointers: name → checkpoint, which may be gone."""
        pointers = {}
        for name in self.list():
            if step_of(name) is not None:
                continue
            try:
                with self.read(name, _POINTER_FILE) as file:
                    pointers[name] = file.read().decode()
            except FileNotFoundError:
                # A process was killed while it wrote the pointer.
                continue
        return pointers

    def clean(self) -> None:
        """Remove what a killed process was writing or deleting. Only for the process that writes, between two saves."""
        for name in self.list():
            if step_of(name) is not None and self._manifest_or_fault(name) == _NO_MANIFEST:
                self.delete(name)

    def __str__(self) -> str:
        """Return where this is, for messages."""
        return type(self).__name__

    # What the framework does with them

    def read_manifest(self, checkpoint: str) -> Manifest:
        """Return the manifest of a checkpoint. Raises CheckpointError, NewerFormatError for a newer format."""
        manifest = self._manifest_or_fault(checkpoint)
        if isinstance(manifest, str):
            raise CheckpointError(f"The checkpoint {self}/{checkpoint} can't be used: {manifest}.")
        return manifest

    def manifest_or_none(self, checkpoint: str) -> Manifest | None:
        """Return the manifest of a checkpoint; None if it can't be used."""
        try:
            return self.read_manifest(checkpoint)
        except CheckpointError:
            return None

    def complete_steps(self) -> dict[int, Manifest]:
        """Return the manifest of every complete checkpoint, by its step and in the order of steps.

        Only manifests and the files' sizes are checked; `find_damage` reads the files.
        """
        complete = {}
        for name in self.list():
            if step_of(name) is None:
                continue
            manifest = self.manifest_or_none(name)
            # A directory that was renamed by hand would be taken for another step, and deleted as that.
            if manifest is None or name != step_name(manifest.step):
                continue
            if self.find_damage(name, thorough=False) is None:
                complete[manifest.step] = manifest
        return dict(sorted(complete.items()))

    def find_damage(self, checkpoint: str, *, thorough: bool = True, rank: int = 0, world_size: int = 1) -> str | None:
        """Return what is wrong with a checkpoint, such as "model.pt is missing"; None if nothing is.

        Unpickles nothing, so a file of unknown origin can't run code. Raises NewerFormatError for a newer format.

        Args:
            thorough: read every file and compare its checksum; else only the manifest and the sizes are checked.
            rank: check every `world_size`-th file from this one on, if ranks share the work.
        """
        manifest = self._manifest_or_fault(checkpoint)
        if isinstance(manifest, str):
            return manifest
        # Someone may have renamed it.
        if step_of(checkpoint) not in (None, manifest.step):
            return f"its {MANIFEST_NAME} is of step {manifest.step}"

        faults = []
        for file in sorted(manifest.files)[rank::world_size]:
            fault = content_damage(partial(self.read, checkpoint, file), manifest.files[file], thorough=thorough)
            if fault is not None:
                faults.append(f"{file} {fault}")
        return "; ".join(faults) or None

    def check_file(self, checkpoint: str, file: str, manifest: Manifest) -> None:
        """Raise CheckpointError if a file of a checkpoint is damaged, or isn't in its manifest."""
        facts = manifest.files.get(file)
        if facts is None:
            fault: str | None = f"isn't in its {MANIFEST_NAME}"
        else:
            fault = content_damage(partial(self.read, checkpoint, file), facts)
        if fault is not None:
            raise CheckpointError(
                f"The checkpoint {self}/{checkpoint} is damaged: {file} {fault}.\n{self.describe_others(checkpoint)}"
            )

    def describe_others(self, checkpoint: str) -> str:
        """Return what to use instead of a checkpoint that can't be used."""
        others = [step_name(step) for step in self.complete_steps() if step_name(step) != checkpoint]
        if not others:
            return "There is no other complete checkpoint beside it."
        return f"Use another one of {self}: {', '.join(others[-_NAMES_SHOWN:])}"

    def _manifest_or_fault(self, checkpoint: str) -> Manifest | str:
        """Return the manifest, or what is wrong with it. Raises NewerFormatError for a newer format."""
        try:
            with self.read(checkpoint, MANIFEST_NAME) as file:
                text = file.read(MAX_RECORD_BYTES + 1)
            if len(text) > MAX_RECORD_BYTES:
                raise ValueError(f"it has more than {MAX_RECORD_BYTES:,} bytes")
            return decode(text, source=f"{self}/{checkpoint}")
        except FileNotFoundError:
            return _NO_MANIFEST
        except OSError as error:
            return f"its {MANIFEST_NAME} is damaged ({error.strerror})"
        except ValueError as error:
            return f"its {MANIFEST_NAME} is damaged ({error})"


class LocalStorage(CheckpointStorage):
    """Checkpoints in a folder of the local disk, or of one that is mounted: a directory each, and symlinks to them.

    A directory is filled under a hidden name, flushed to the disk and then renamed: what has a step's name is complete,
    and a kill at any moment leaves the earlier checkpoints undamaged. One process at a time may write to a folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @staticmethod
    def of(directory: Path) -> tuple[LocalStorage, str]:
        """Return the storage and the name of the checkpoint in a directory."""
        return LocalStorage(directory.parent), directory.name

    def __str__(self) -> str:
        return str(self.folder)

    def write(self, checkpoint: str, files: Mapping[str, WriteContent]) -> None:
        """Write a checkpoint; it is on the disk when this returns."""
        try:
            self.begin(checkpoint)
            self.finish(checkpoint, files)
        finally:
            self.discard_unfinished(checkpoint)

    def begin(self, checkpoint: str) -> None:
        """Make the hidden directory in which a checkpoint is written, and remove what killed processes have left."""
        # Without its parents: a run directory that was moved away must not be made again.
        self.folder.mkdir(exist_ok=True)
        self.clean()
        self.unfinished(checkpoint).mkdir()

    def finish(self, checkpoint: str, files: Mapping[str, WriteContent]) -> None:
        """Write `files` into that directory, flush it to the disk, and give it its name."""
        directory = self.unfinished(checkpoint)
        for name, write_content in files.items():
            with DirectFile(directory / name) as file:
                write_content(file)
                file.finish()

        for path in directory.iterdir():
            if path.is_dir():
                _fsync_directory(path)
        _fsync_directory(directory)

        # A checkpoint that has this name already is of training that was abandoned when a run was resumed.
        final = self.folder / checkpoint
        if final.exists():
            self.delete(checkpoint)
        directory.rename(final)
        _fsync_directory(self.folder)

    def unfinished(self, checkpoint: str) -> Path:
        """Return the directory of a checkpoint between `begin` and `finish`."""
        return self.folder / f"{_SAVING}{checkpoint}"

    def discard_unfinished(self, checkpoint: str) -> None:
        """Remove what a failure has left between `begin` and `finish`."""
        _discard(self.unfinished(checkpoint))

    def read(self, checkpoint: str, file: str) -> BinaryIO:
        """Open a regular file. Raises OSError for anything else, such as a FIFO, which would block."""
        return open_regular(self.folder / checkpoint / file)

    def list(self) -> Collection[str]:
        """Return the names of the directories in the folder; hidden ones are unfinished or being deleted."""
        names = []
        for path in self._paths():
            is_directory = path.is_dir() and not path.is_symlink()
            if is_directory and not path.name.startswith("."):
                names.append(path.name)
        return names

    def delete(self, checkpoint: str) -> None:
        """Delete a checkpoint, which is gone or complete after a kill, or a pointer."""
        path = self.folder / checkpoint
        if path.is_symlink():
            path.unlink()
            return
        hidden = self.folder / f"{_DELETED}{checkpoint}"
        _discard(hidden)
        path.rename(hidden)
        _discard(hidden)

    def point(self, pointer: str, checkpoint: str) -> None:
        """Make a symlink to a checkpoint; a reader sees the old or the new one."""
        path = self.folder / pointer
        # A copy of the folder that was made by following symlinks has a directory in its place.
        if path.is_dir() and not path.is_symlink():
            self.delete(pointer)
        temporary = self.folder / f"{_SAVING}{pointer}"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(checkpoint)
        temporary.replace(path)
        _fsync_directory(self.folder)

    def pointers(self) -> dict[str, str]:
        """Return what symlinks in the folder name, the user's own too."""
        return {path.name: path.readlink().name for path in self._paths() if path.is_symlink()}

    def clean(self) -> None:
        """Remove hidden directories that a killed process has left."""
        for path in self._paths():
            if path.name.startswith((_DELETED, _SAVING)):
                _discard(path)

    def _paths(self) -> Collection[Path]:
        if not self.folder.is_dir():
            return []
        return list(self.folder.iterdir())


@contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Raise DiskError, with a text that begins with `what`, for an OSError in the block."""
    try:
        yield
    except OSError as error:
        raise DiskError(f"{what}: {error.strerror or error}.\nEarlier checkpoints are untouched.") from error


def _discard(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        # It isn't read any more: if deleting fails, it only takes space, and the next save tries again.
        shutil.rmtree(path, ignore_errors=True)


def _fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and FUSE file systems don't know this for directories; they order renames on their own.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
