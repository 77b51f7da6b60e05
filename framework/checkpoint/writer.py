"""Write a checkpoint so that a kill at any moment leaves the earlier ones undamaged.

A directory is filled under a hidden name, flushed to the disk and then renamed: what has a step's name is complete.
Nothing here knows of ranks: one process writes; state in, directory out.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.serialization

from framework.checkpoint.direct_io import ChecksummedFile
from framework.checkpoint.layout import (
    CONFIG_NAME,
    MANIFEST_NAME,
    PARTS,
    SHARDS,
    Manifest,
    encode,
    part_file,
    step_name,
)
from framework.errors import CheckpointError, DiskError
from framework.system.files import FileFacts, file_damage
from framework.system.versions import installed_versions

if TYPE_CHECKING:
    from framework.checkpoint.shards import Shards

_SAVING = ".saving_"
_DELETED = ".deleted_"

_VALUES = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray, torch.Tensor, torch.nn.Parameter})
_VALUES |= {torch.Size, torch.device, torch.dtype}
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
    temporary, final_name = folder / f"{_SAVING}{step_name(step)}", folder / step_name(step)

    def begin() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        clean(folder)
        cleanup.callback(shutil.rmtree, temporary, ignore_errors=True)  # after a failure
        temporary.mkdir()

    def finish(files: dict[str, FileFacts]) -> None:
        if missing := [name for name, facts in files.items() if file_damage(temporary / name, facts, thorough=False)]:
            raise DiskError(
                f"Rank 0 doesn't see all files that the others have written to {folder}: {', '.join(missing[:4])}.\n"
                "Put the run directory on a disk that all nodes share: path.outputs=FOLDER"
            )
        for part in PARTS:
            if part in state:
                files[part_file(part)] = _write_file(temporary / part_file(part), partial(torch.save, state[part]))
        files[CONFIG_NAME] = _write_text(temporary / CONFIG_NAME, config_text)
        manifest = Manifest(
            step=step,
            epoch=epoch,
            metrics=dict(metrics),
            files=files,
            framework_version=installed_versions(("framework",))["framework"],
            torch_version=torch.__version__,
        )
        _write_text(temporary / MANIFEST_NAME, encode(manifest))
        if manifest.is_sharded:
            _fsync_directory(temporary / SHARDS)
        _fsync_directory(temporary)
        if final_name.exists():  # of training that was abandoned: `last` names an earlier one
            remove(final_name)
        temporary.rename(final_name)
        _fsync_directory(folder)

    with disk_errors(f"The checkpoint of step {step} can't be written to {folder}"), ExitStack() as cleanup:
        if shards is None:
            begin()
            finish({})
        else:
            shards.write(temporary, begin=begin, finish=finish)
    return final_name


def point(folder: Path, pointer: str, *, step: int) -> None:
    """Make the symlink `pointer` name the checkpoint of `step`; a reader sees the old or the new one."""
    path, target = folder / pointer, step_name(step)
    temporary = folder / f"{_SAVING}{pointer}"
    with disk_errors(f"The pointer {path} can't be moved to {target}"):
        if path.is_dir() and not path.is_symlink():  # in a copy that was made by following symlinks
            remove(path)
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target)
        temporary.replace(path)
        _fsync_directory(folder)


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


def _write_file(path: Path, write: Callable[[ChecksummedFile], object]) -> FileFacts:
    settings: Any = torch.utils.serialization.config
    # Zip's own checksums take a third of `torch.save`'s time.
    with ChecksummedFile(path) as file, settings.patch("save.compute_crc32", False):
        write(file)
        return file.finish()


def _write_text(path: Path, text: str) -> FileFacts:
    return _write_file(path, lambda file: file.write(text.encode()))


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
    if kind in _VALUES:
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
            "them: give number.item(), torch.from_numpy(array), str(path), dict(mapping), module.state_dict()."
        )
