"""Writing a checkpoint so that a kill at any moment leaves the earlier ones whole, and reading only whole ones.

A directory is filled under a hidden name, flushed to the disk and then renamed: what bears a step's name is complete.
Nothing here knows of ranks: one process writes; state in, directory out.
"""

from __future__ import annotations

import errno
import os
import pickle
import re
import shutil
import socket
import time
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import IO, Any, cast, final

import torch

from framework.checkpoint.format import (
    CONFIG_NAME,
    MANIFEST_NAME,
    PARTS,
    FileFacts,
    Manifest,
    encode,
    part_file,
    step_name,
)
from framework.checkpoint.lookup import REPLACED, describe_others, manifest_if_complete, read_manifest
from framework.checkpoint.plain import check_plain
from framework.errors import CheckpointError, RunError

_SAVING = ".saving_"
_DELETED = ".deleted_"
_ABANDONED_AFTER_S = 3600.0
_READ_BYTES = 1 << 20


def write(
    folder: Path, state: Mapping[str, Any], *, step: int, epoch: int, metrics: Mapping[str, float], config_text: str
) -> Path:
    """Write one checkpoint below `folder` and return its directory; it is on the disk when this returns.

    state: one entry for each of PARTS. One process at a time may write to a folder. A checkpoint of the same step is
    replaced. What earlier processes left half done is cleaned away first. Raises CheckpointError where the state holds
    something that can't be read back (nothing is written then), RunError where the disk refuses; what was there stays.
    """
    if set(state) != set(PARTS):
        raise ValueError(f"a checkpoint's state has the entries {PARTS}, not {tuple(state)}")
    for part in PARTS:
        # Entries of `training` are named as the user knows them: callbacks.early_stopping, not training.callbacks…
        check_plain(state[part], name="" if part == "training" else part)
    temporary = folder / f"{_SAVING}{step_name(step)}{_mark()}"
    with _disk_errors(f"The checkpoint of step {step} can't be written to {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        clean(folder)
        try:
            temporary.mkdir()
            files = {part_file(part): _save_tensors(temporary / part_file(part), state[part]) for part in PARTS}
            files[CONFIG_NAME] = _save_text(temporary / CONFIG_NAME, config_text)
            manifest = Manifest(
                step=step,
                epoch=epoch,
                metrics=dict(metrics),
                files=files,
                framework_version=_framework_version(),
                torch_version=torch.__version__,
            )
            _save_text(temporary / MANIFEST_NAME, encode(manifest))
            _fsync_directory(temporary)
            _install(temporary, final=folder / step_name(step))
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    return folder / step_name(step)


def load(directory: Path, *, map_location: str | torch.device, parts: Collection[str] = PARTS) -> dict[str, Any]:
    """The parts of a step directory (see `find`), each checked for size and checksum before it is read.

    map_location: where the tensors of `model` go. Those of `training` and `generators` stay on the CPU: optimizers move
    what belongs beside their parameters themselves, their step counters would cost a wait per step on a GPU, and
    generators take CPU tensors. Raises CheckpointError where a file is missing, damaged, of a newer format, or holds
    Python objects.
    """
    manifest = read_manifest(directory)
    return {
        part: _load_tensors(
            directory, part_file(part), manifest=manifest, map_location=map_location if part == "model" else "cpu"
        )
        for part in parts
    }


def point(folder: Path, pointer: str, *, step: int) -> None:
    """Make the symlink `pointer` name the checkpoint of `step`; a reader sees the old or the new one, never neither."""
    path, target = folder / pointer, step_name(step)
    if path.is_symlink() and str(path.readlink()) == target:
        return
    temporary = folder / f"{_SAVING}{pointer}{_mark()}"
    with _disk_errors(f"The pointer {path} can't be moved to {target}"):
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target)
        temporary.replace(path)
        _fsync_directory(folder)


def remove(directory: Path) -> None:
    """Delete a checkpoint; killed in between, it is gone or whole, never half there under its name."""
    hidden = directory.with_name(_DELETED + directory.name)
    with _disk_errors(f"The checkpoint {directory} can't be deleted"):
        _discard(hidden)
        directory.rename(hidden)
        _discard(hidden)


def clean(folder: Path) -> None:
    """Finish or undo what a dead process left half done: replacing, deleting, writing. For the writing process only."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith(REPLACED):
            _finish_replacing(path, final=path.with_name(path.name.removeprefix(REPLACED)))
        elif path.name.startswith(_DELETED) or (path.name.startswith(_SAVING) and _is_abandoned(path)):
            _discard(path)


def _finish_replacing(aside: Path, *, final: Path) -> None:
    if manifest_if_complete(final) is not None:
        _discard(aside)
    else:
        _discard(final)
        aside.rename(final)


def _install(temporary: Path, *, final: Path) -> None:
    aside = final.with_name(REPLACED + final.name)
    if final.exists():
        # A directory can't be renamed over another. Between the two renames `find` takes the one set aside.
        final.rename(aside)
    temporary.rename(final)
    _fsync_directory(final.parent)
    _discard(aside)


def _discard(path: Path) -> None:
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        # Nobody reads it any more: where deleting fails it costs space only, and the next save tries again.
        shutil.rmtree(path, ignore_errors=True)


def _mark() -> str:
    return f".{os.getpid()}.{socket.gethostname()}"


def _is_abandoned(path: Path) -> bool:
    _, _, process = path.name.partition(".")[2].partition(".")
    pid, _, host = process.partition(".")
    if host == socket.gethostname() and pid.isdecimal():
        # This process writes one at a time, so what bears its number is an earlier one's: container pids repeat.
        return int(pid) == os.getpid() or not _is_alive(int(pid))
    entries = [path] if path.is_symlink() else [path, *path.iterdir()]
    last_change_s = max(entry.lstat().st_mtime for entry in entries)
    return time.time() - last_change_s > _ABANDONED_AFTER_S


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@final
class _ChecksummedFile:
    """A file to write that sums up what goes through it.

    An error of the disk is kept until `finish`: raised inside `torch.save` it would come out as another one.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._error: OSError | None = None
        self._size_bytes = 0
        self._crc32 = 0

    def write(self, data: bytes | memoryview) -> int:
        size_bytes = memoryview(data).nbytes
        if self._error is None:
            try:
                self._file.write(data)
                self._size_bytes += size_bytes
                self._crc32 = zlib.crc32(data, self._crc32)
            except OSError as error:
                self._error = error
        return size_bytes

    def flush(self) -> None:
        """Nothing yet: `torch.save` calls it, `finish` does it."""

    def finish(self) -> FileFacts:
        """Flush to the disk. Raises the first OSError there was."""
        if self._error is not None:
            raise self._error
        self._file.flush()
        os.fsync(self._file.fileno())
        return FileFacts(size_bytes=self._size_bytes, crc32=f"{self._crc32:08x}")


def _save_tensors(path: Path, content: Any) -> FileFacts:
    with path.open("wb") as file:
        checksummed = _ChecksummedFile(file)
        torch.save(content, cast(IO[bytes], checksummed))
        return checksummed.finish()


def _save_text(path: Path, text: str) -> FileFacts:
    with path.open("wb") as file:
        checksummed = _ChecksummedFile(file)
        checksummed.write(text.encode())
        return checksummed.finish()


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


@contextmanager
def _disk_errors(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{what}: {error.strerror or error}.\nEarlier checkpoints are untouched. Make room or mend the folder's "
            f"permissions, then resume the run."
        ) from error


def _load_tensors(directory: Path, name: str, *, manifest: Manifest, map_location: str | torch.device) -> Any:
    path = directory / name
    fault = _fault(path, facts=manifest.files.get(name))
    if fault is not None:
        raise CheckpointError(f"The checkpoint {directory} is damaged: {name} {fault}.\n{describe_others(directory)}")
    try:
        return torch.load(path, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        raise CheckpointError(
            f"The checkpoint {directory} was not read: {name} holds Python objects{f' ({named[1]})' if named else ''}, "
            f"which could run any code.\nIt may hold tensors and plain values only; save it anew from the run that "
            f"made it.\n{describe_others(directory)}"
        ) from error


def _fault(path: Path, *, facts: FileFacts | None) -> str | None:
    """What is wrong with a file; None where it is as it was written."""
    if facts is None:
        return "is not in its manifest"
    try:
        size_bytes = path.stat().st_size
        if size_bytes != facts.size_bytes:
            return f"has {size_bytes} bytes instead of {facts.size_bytes}"
        crc32 = 0
        with path.open("rb") as file:
            while block := file.read(_READ_BYTES):
                crc32 = zlib.crc32(block, crc32)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"can't be read ({error.strerror or error})"
    return None if f"{crc32:08x}" == facts.crc32 else "has another checksum than when it was written"


def _framework_version() -> str:
    try:
        return metadata.version("framework")
    except metadata.PackageNotFoundError:
        return "not installed"
