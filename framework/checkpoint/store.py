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
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.utils.serialization

from framework.checkpoint.files import BLOCK_BYTES, ChecksummedFile
from framework.checkpoint.format import (
    CONFIG_NAME,
    MANIFEST_NAME,
    PARTS,
    SHARDED_VERSION,
    SHARDS,
    WHOLE_VERSION,
    FileFacts,
    Manifest,
    encode,
    part_file,
    step_name,
)
from framework.checkpoint.lookup import REPLACED, describe_others, manifest_if_complete, read_manifest
from framework.checkpoint.plain import check_plain
from framework.checkpoint.whole import file_fault
from framework.errors import CheckpointError, DiskError

_SAVING = ".saving_"
_DELETED = ".deleted_"

WriteShards = Callable[[Path], Mapping[str, FileFacts]]
"""Gets a checkpoint's directory, has shards written there, and gives the facts of the files."""


def write(
    folder: Path,
    state: Mapping[str, Any],
    *,
    step: int,
    epoch: int,
    metrics: Mapping[str, float],
    config_text: str,
    write_shards: WriteShards | None = None,
) -> Path:
    """Write one checkpoint below `folder` and return its directory; it is on the disk when this returns.

    state: as `check_state` wants it. write_shards: has what is spread over ranks written into the directory it is
    given, in place of `model`; gives the facts of the files. One process at a time may write to a folder. A checkpoint
    of the same step is replaced. What earlier processes left half done is cleaned away first. Raises DiskError where
    the disk refuses; what was there stays.
    """
    temporary = folder / f"{_SAVING}{step_name(step)}"
    with disk_errors(f"The checkpoint of step {step} can't be written to {folder}"):
        make(folder)
        clean(folder)
        try:
            temporary.mkdir()
            files = {} if write_shards is None else dict(write_shards(temporary))
            for part in PARTS:
                if part in state:
                    files[part_file(part)] = _save_tensors(temporary / part_file(part), state[part])
            files[CONFIG_NAME] = _save_text(temporary / CONFIG_NAME, config_text)
            manifest = Manifest(
                step=step,
                epoch=epoch,
                metrics=dict(metrics),
                files=files,
                framework_version=_framework_version(),
                torch_version=torch.__version__,
                format_version=WHOLE_VERSION if write_shards is None else SHARDED_VERSION,
            )
            _save_text(temporary / MANIFEST_NAME, encode(manifest))
            if manifest.is_sharded:
                _fsync_directory(temporary / SHARDS)
            _fsync_directory(temporary)
            _install(temporary, final=folder / step_name(step))
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    return folder / step_name(step)


def check_state(state: Mapping[str, Any]) -> None:
    """Raise CheckpointError where a checkpoint can't hold it, naming the entry."""
    if set(state) not in (set(PARTS), set(PARTS) - {"model"}):
        raise ValueError(f"a checkpoint's state has the entries {PARTS}, or no model, not {tuple(state)}")
    for part in state:
        # Entries of `training` are named as the user knows them: callbacks.early_stopping, not training.callbacks…
        check_plain(state[part], name="" if part == "training" else part)


def load(directory: Path, *, map_location: str | torch.device, parts: Collection[str] = PARTS) -> dict[str, Any]:
    """The parts of a step directory (see `find`), each checked for size and checksum before it is read.

    map_location: where the tensors of `model` go. Those of `training` and `generators` stay on the CPU: optimizers move
    what belongs beside their parameters themselves, their step counters would cost a wait per step on a GPU, and
    generators take CPU tensors. Of a model that was spread over ranks everything is put together, as if it hadn't been;
    that needs no process group. Raises CheckpointError where a file is missing, damaged, of a newer format, or holds
    Python objects.
    """
    manifest = read_manifest(directory)
    if not manifest.is_sharded:
        return {
            part: _load_tensors(
                directory, part_file(part), manifest=manifest, map_location=map_location if part == "model" else "cpu"
            )
            for part in parts
        }
    from framework.checkpoint.spread import put_together  # takes most of a second to import

    check_shards(directory, manifest)
    # What isn't spread says how the rest goes together.
    given = load_unspread(directory, manifest, parts=[*(part for part in parts if part != "model"), "training"])
    together = put_together(directory, manifest, given, parts=parts, map_location=map_location)
    return {part: together[part] for part in parts}


def load_unspread(directory: Path, manifest: Manifest, *, parts: Collection[str]) -> dict[str, Any]:
    """Parts of a sharded checkpoint as they lie in their files; `framework.checkpoint.spread` puts them together."""
    return {
        part: _load_tensors(directory, part_file(part), manifest=manifest, map_location="cpu")
        for part in dict.fromkeys(parts)
    }


def check_shards(directory: Path, manifest: Manifest, *, number: int = 0, of: int = 1) -> None:
    """Raise CheckpointError where a shard isn't as it was written. Looks at every `of`-th file, from `number` on."""
    names = sorted(name for name in manifest.files if name.startswith(f"{SHARDS}/"))
    for name in names[number::of]:
        fault = file_fault(directory / name, facts=manifest.files[name])
        if fault is not None:
            raise CheckpointError(
                f"The checkpoint {directory} is damaged: {name} {fault}.\n{describe_others(directory)}"
            )


def point(folder: Path, pointer: str, *, step: int) -> None:
    """Make the symlink `pointer` name the checkpoint of `step`; a reader sees the old or the new one, never neither."""
    path, target = folder / pointer, step_name(step)
    if path.is_symlink() and str(path.readlink()) == target:
        return
    temporary = folder / f"{_SAVING}{pointer}"
    with disk_errors(f"The pointer {path} can't be moved to {target}"):
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target)
        temporary.replace(path)
        _fsync_directory(folder)


def make(folder: Path) -> None:
    """The folder of a run's checkpoints, where it isn't there yet; it is on the disk when this returns."""
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        _fsync_directory(folder.parent)


def mend_pointer(folder: Path, pointer: str) -> None:
    """Make a symlink again of a pointer of which a copy that follows symlinks has made a directory."""
    path = folder / pointer
    if path.is_symlink() or not path.is_dir():
        return
    manifest = manifest_if_complete(path)
    with disk_errors(f"The copy {path} can't be made a pointer"):
        if manifest is None:
            path.rename(folder / f"{pointer}_damaged")
            return
        own = folder / step_name(manifest.step)
        path.rename(folder / f"{_DELETED}{pointer}" if own.exists() else own)
        point(folder, pointer, step=manifest.step)


def remove(directory: Path) -> None:
    """Delete a checkpoint; killed in between, it is gone or whole, never half there under its name."""
    hidden = directory.with_name(_DELETED + directory.name)
    with disk_errors(f"The checkpoint {directory} can't be deleted"):
        _discard(hidden)
        directory.rename(hidden)
        _discard(hidden)


def clean(folder: Path) -> None:
    """Finish or undo what a dead process left half done: replacing, deleting, writing.

    For the process that writes, while it isn't at it; it is the only one, for the run directory is locked.
    """
    for path in sorted(folder.iterdir()):
        if path.name.startswith(REPLACED):
            _finish_replacing(path, final=path.with_name(path.name.removeprefix(REPLACED)))
        elif path.name.startswith((_DELETED, _SAVING)):
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
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        # Nobody reads it any more: where deleting fails it costs space only, and the next save tries again.
        shutil.rmtree(path, ignore_errors=True)


def _save_tensors(path: Path, content: Any) -> FileFacts:
    with ChecksummedFile(path) as file, saved_plainly():
        torch.save(content, cast(IO[bytes], file))
        return file.finish()


@contextmanager
def saved_plainly() -> Iterator[None]:
    """`torch.save` without a checksum of its own for each tensor, and with tensors where they go to the disk as is."""
    settings = torch.utils.serialization.config.save
    before = settings.compute_crc32, settings.storage_alignment
    settings.compute_crc32, settings.storage_alignment = False, BLOCK_BYTES
    try:
        yield
    finally:
        settings.compute_crc32, settings.storage_alignment = before


def _save_text(path: Path, text: str) -> FileFacts:
    with ChecksummedFile(path) as file:
        file.write(text.encode())
        return file.finish()


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
def disk_errors(what: str) -> Iterator[None]:
    """Make DiskError of what the disk refuses while this is entered; `what` begins its text."""
    try:
        yield
    except OSError as error:
        raise DiskError(f"{what}: {error.strerror or error}.\nEarlier checkpoints are untouched.") from error


def _load_tensors(directory: Path, name: str, *, manifest: Manifest, map_location: str | torch.device) -> Any:
    path = directory / name
    fault = file_fault(path, facts=manifest.files.get(name))
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


def _framework_version() -> str:
    try:
        return metadata.version("framework")
    except metadata.PackageNotFoundError:
        return "not installed"
