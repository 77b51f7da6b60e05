"""Write a checkpoint so that a kill at any moment leaves the earlier ones undamaged.

A directory is filled under a hidden name, flushed to the disk and then renamed: what has a step's name is complete.
Nothing here knows of ranks: one process writes; state in, directory out.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import torch
import torch.utils.serialization

from framework.checkpoint.direct_io import BLOCK_BYTES, ChecksummedFile
from framework.checkpoint.layout import (
    CONFIG_NAME,
    MANIFEST_NAME,
    PARTS,
    SHARDED_VERSION,
    SHARDS,
    WHOLE_VERSION,
    FileFacts,
    Manifest,
    encode,
    file_damage,
    manifest_or_none,
    part_file,
    step_name,
)
from framework.errors import CheckpointError, DiskError
from framework.system.versions import installed_versions

if TYPE_CHECKING:
    from framework.checkpoint.sharded_writer import Shards

_SAVING = ".saving_"
_DELETED = ".deleted_"

_VALUES = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray, torch.Tensor, torch.nn.Parameter})
_VALUES_OF_TORCH = frozenset({torch.Size, torch.device, torch.dtype})
_MAPPINGS = frozenset({dict, OrderedDict, Counter})
_SEQUENCES = frozenset({list, tuple, set})


def write(
    folder: Path,
    state: Mapping[str, Any],
    *,
    step: int,
    epoch: int,
    metrics: Mapping[str, float],
    config_text: str,
    shards: Shards | None = None,
) -> Path:
    """Write one checkpoint below `folder` and return its directory; it is on the disk when this returns.

    A checkpoint of the same step is replaced, and what killed processes left is removed. One process at a time may
    write to a folder; with `shards`, of a sharded model, every rank must call it. Raises DiskError if the disk refuses;
    earlier checkpoints stay.

    Args:
        state: as `check_plain` requires; with `shards` without `model`, and only rank 0's is used.
    """
    temporary = folder / f"{_SAVING}{step_name(step)}"
    files: dict[str, FileFacts] = {}

    def begin() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        clean(folder)
        temporary.mkdir()

    def finish() -> None:
        if missing := [name for name, facts in files.items() if file_damage(temporary / name, facts, thorough=False)]:
            raise DiskError(
                f"Rank 0 doesn't see all files that the others have written to {folder}: {', '.join(missing[:4])}.\n"
                "Put the run directory on a disk that all nodes share: path.outputs=FOLDER"
            )
        for part in PARTS:
            if part in state:
                files[part_file(part)] = _save_tensors(temporary / part_file(part), state[part])
        files[CONFIG_NAME] = _save_text(temporary / CONFIG_NAME, config_text)
        manifest = Manifest(
            step=step,
            epoch=epoch,
            metrics=dict(metrics),
            files=files,
            framework_version=installed_versions(("framework",))["framework"],
            torch_version=torch.__version__,
            format_version=WHOLE_VERSION if shards is None else SHARDED_VERSION,
        )
        _save_text(temporary / MANIFEST_NAME, encode(manifest))
        if manifest.is_sharded:
            _fsync_directory(temporary / SHARDS)
        _fsync_directory(temporary)
        final = folder / step_name(step)
        if final.exists():  # of training that was abandoned: `last` names an earlier one
            remove(final)
        temporary.rename(final)
        _fsync_directory(folder)

    with disk_errors(f"The checkpoint of step {step} can't be written to {folder}"):
        try:
            if shards is None:
                begin()
                finish()
            else:
                shards.on_first_rank(begin)
                files |= shards.write(temporary)
                shards.on_first_rank(finish)
        except BaseException:
            if shards is None or shards.is_first_rank:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
    return folder / step_name(step)


def point(folder: Path, pointer: str, *, step: int) -> None:
    """Make the symlink `pointer` name the checkpoint of `step`; a reader sees the old or the new one."""
    path, target = folder / pointer, step_name(step)
    if path.is_symlink() and str(path.readlink()) == target:
        return
    temporary = folder / f"{_SAVING}{pointer}"
    with disk_errors(f"The pointer {path} can't be moved to {target}"):
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target)
        temporary.replace(path)
        _fsync_directory(folder)


def restore_symlink(folder: Path, pointer: str) -> None:
    """Make a symlink of `pointer` again if a copy that follows symlinks has made a directory of it."""
    path = folder / pointer
    manifest = None if path.is_symlink() else manifest_or_none(path)
    if manifest is None:
        return
    with disk_errors(f"The copy {path} can't be made a symlink"):
        own = folder / step_name(manifest.step)
        path.rename(folder / f"{_DELETED}{pointer}" if own.exists() else own)
        point(folder, pointer, step=manifest.step)


def remove(directory: Path) -> None:
    """Delete a checkpoint; after a kill it is gone or complete."""
    hidden = directory.with_name(_DELETED + directory.name)
    with disk_errors(f"The checkpoint {directory} can't be deleted"):
        _discard(hidden)
        directory.rename(hidden)
        _discard(hidden)


def clean(folder: Path) -> None:
    """Remove what a killed process was writing or deleting. Only for the process that writes, between two writes."""
    for path in folder.iterdir():
        if path.name.startswith((_DELETED, _SAVING)):
            _discard(path)


def _discard(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        # It isn't read any more: if deleting fails, it only takes space, and the next save tries again.
        shutil.rmtree(path, ignore_errors=True)


# Zip's own checksums take a third of `torch.save`'s time, and `ChecksummedFile` wants tensors at whole blocks.
_SAVED_AS = {"save.compute_crc32": False, "save.storage_alignment": BLOCK_BYTES}


def _save_tensors(path: Path, content: Any) -> FileFacts:
    settings: Any = torch.utils.serialization.config
    with ChecksummedFile(path) as file, settings.patch(_SAVED_AS):
        torch.save(content, cast(IO[bytes], file))
        return file.finish()


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
    """Raise DiskError, with a text that begins with `what`, for an OSError in the block."""
    try:
        yield
    except OSError as error:
        raise DiskError(f"{what}: {error.strerror or error}.\nEarlier checkpoints are untouched.") from error


def check_plain(state: Any, *, name: str = "") -> None:
    """Raise CheckpointError, naming the entry, if `torch.load(weights_only=True)` would not read `state` back.

    Types are compared exactly: a subclass would come back as something else, or not at all.
    """
    kind = type(state)
    if kind in _VALUES or kind in _VALUES_OF_TORCH:
        return
    if kind in _MAPPINGS:
        for key, value in state.items():
            below = f"{name}.{key}".lstrip(".") if isinstance(key, str) else f"{name}[{key!r}]"
            check_plain(key, name=f"the key {below}")
            check_plain(value, name=below)
    elif kind in _SEQUENCES:
        for index, value in enumerate(state):
            check_plain(value, name=f"{name}[{index}]")
    else:
        raise CheckpointError(
            f"The state to save has at {name or 'its top'} a {kind.__module__}.{kind.__qualname__}, which a checkpoint "
            f"can't hold.\nIt may hold tensors, numbers, strings, bytes, None, and dicts, lists, tuples and sets of "
            f"them.\n{_advice(state)}"
        )


def _advice(value: Any) -> str:
    kind = type(value)
    if kind.__module__.partition(".")[0] == "numpy":
        return "Give a NumPy number's .item(), and of an array torch.from_numpy(array) or .tolist()."
    if isinstance(value, torch.Tensor):
        return "Give a plain tensor: tensor.as_subclass(torch.Tensor)."
    if callable(getattr(value, "state_dict", None)):
        return "Give its state_dict() instead, and load that in load_state_dict."
    if isinstance(value, Path):
        return "Give str(path)."
    if isinstance(value, (dict, list, tuple, set)):
        plain = next(base.__name__ for base in kind.__mro__ if base in _MAPPINGS | _SEQUENCES)
        return f"Give {plain}(...) of it."
    return "Give the plain values it is made of, and build it again in load_state_dict."
