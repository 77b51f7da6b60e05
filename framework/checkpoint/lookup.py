"""Find the checkpoint, or the files of weights, that a path means. Reads only, and imports no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import final

from framework.checkpoint.layout import LAST, MANIFEST_NAME, Manifest, step_name, step_of, steps_of
from framework.checkpoint.storage import LocalStorage
from framework.config.suggest import nearest
from framework.errors import CheckpointError, ConfigError
from framework.system.files import read_json

_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
_SAFETENSORS = "model.safetensors"
_PYTORCH = "pytorch_model.bin"
_INDEX = ".index.json"
# The files of weights in a folder of transformers, in the order in which it looks for them.
_IN_FOLDER = (_SAFETENSORS, f"{_SAFETENSORS}{_INDEX}", _PYTORCH, f"{_PYTORCH}{_INDEX}")


# A checkpoint that is given as a directory


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest of a step directory. Raises CheckpointError, NewerFormatError for a newer format."""
    storage, checkpoint = LocalStorage.of(directory)
    return storage.read_manifest(checkpoint)


def manifest_or_none(directory: Path) -> Manifest | None:
    """Return the manifest of a step directory; None if it can't be used."""
    storage, checkpoint = LocalStorage.of(directory)
    return storage.manifest_or_none(checkpoint)


def complete_steps(folder: Path) -> dict[int, tuple[Path, Manifest]]:
    """Return every complete checkpoint of a checkpoints folder: step → (directory, manifest), in the order of steps.

    Only manifests and the files' sizes are checked; `find_damage` reads the files.
    """
    manifests = LocalStorage(folder).complete_steps()
    return {step: (folder / step_name(step), manifest) for step, manifest in manifests.items()}


def find_damage(directory: Path, *, thorough: bool = True, rank: int = 0, world_size: int = 1) -> str | None:
    """Return what is wrong with a step directory; see `CheckpointStorage.find_damage`."""
    if not directory.exists():
        return "it is gone"
    if not directory.is_dir():
        return "it isn't a directory"
    storage, checkpoint = LocalStorage.of(directory)
    return storage.find_damage(checkpoint, thorough=thorough, rank=rank, world_size=world_size)


def describe_others(directory: Path) -> str:
    """Return what to use instead of a checkpoint that can't be used."""
    storage, checkpoint = LocalStorage.of(directory)
    return storage.describe_others(checkpoint)


# What a path means


@final
@dataclass(frozen=True)
class LastUndamaged:
    """The checkpoint to resume from, and those that were passed over."""

    # Absolute, without symlinks; None if there never was a checkpoint.
    directory: Path | None
    # (directory, what is wrong with it) of each that would have come before it, the newest first.
    damaged: tuple[tuple[Path, str], ...] = ()


def last_undamaged(folder: Path, *, find_damage: Callable[[Path], str | None] = find_damage) -> LastUndamaged:
    """Return the checkpoint of a checkpoints folder that `last` names, or the newest undamaged one before it.

    Without `last` it is the newest of all. One that is newer than `last` is never taken: it may be of training that was
    abandoned. Raises CheckpointError if all checkpoints are damaged, NewerFormatError if the first that isn't is of a
    newer framework.
    """
    folder = folder.resolve()
    damaged: dict[Path, str] = {}
    for directory in _from_last(folder):
        fault = find_damage(directory)
        if fault is None:
            return LastUndamaged(directory.resolve(), tuple(damaged.items()))
        damaged[directory] = fault
    if not damaged:
        return LastUndamaged(None)
    lines = "".join(f"  {directory.name}: {fault}\n" for directory, fault in damaged.items())
    raise CheckpointError(
        f"The checkpoints in {folder}, from `{LAST}` back, are damaged:\n{lines}"
        "Restore one from a copy, or start a new run."
    )


def find(path: Path) -> Path:
    """Return the step directory that `path` means, as an absolute path without symlinks.

    Raises CheckpointError, naming what is there, if there is none or it isn't complete; never returns another instead.

    Args:
        path: a run directory or its checkpoints folder (both mean `last`), a step directory, or a symlink such as
            `best`, which may also follow the run directory.
    """
    path = path.expanduser()
    in_checkpoints = path.parent / "checkpoints" / path.name
    if not os.path.lexists(path) and os.path.lexists(in_checkpoints):
        path = in_checkpoints
    _check_directory(path)
    path = path.resolve()

    is_checkpoint = (path / MANIFEST_NAME).exists() or step_of(path.name) is not None
    if is_checkpoint:
        try:
            read_manifest(path)
        except CheckpointError as error:
            raise CheckpointError(f"{error}\n{describe_others(path)}") from error
        return path

    # A run directory, or its checkpoints folder.
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if os.path.lexists(folder / LAST):
        return find(folder / LAST)
    # The symlink is lost: by a kill before the first one was made, or by a copy that skipped symlinks.
    steps = complete_steps(folder)
    if not steps:
        raise CheckpointError(
            f"There is no complete checkpoint in {folder}: it isn't a run's directory, or the run ended before its "
            "first checkpoint.\nUse outputs/RECIPE/RUN of a run that has one; init_from also takes a folder with "
            f"{_SAFETENSORS} or {_PYTORCH}."
        )
    newest, _ = steps[max(steps)]
    return newest


def _check_directory(path: Path) -> None:
    """Raise CheckpointError, naming what is there, if `path` isn't a directory."""
    if path.is_symlink() and not path.exists():
        target = path.parent / path.readlink()
        raise CheckpointError(f"{path} points to {target.name}, which is gone.\n{describe_others(target)}")
    if path.is_file():
        raise CheckpointError(
            f"{path} is a file. checkpoint.path takes a checkpoint of this framework, which is a directory: "
            "outputs/RECIPE/RUN for a run's last one, or outputs/RECIPE/RUN/checkpoints/best"
        )
    if not path.is_dir():
        raise CheckpointError(f"There is no checkpoint at {path}.\n{_what_is_near(path)}")


def find_weights(path: Path) -> tuple[Path, ...] | None:
    """Return the files of weights that something else has written; None if `path` can only mean a checkpoint of ours.

    path: a `.safetensors` file, a state dict, or a folder as transformers saves it. Raises CheckpointError for any
    other file, and for an index with a file that isn't there; ConfigError if safetensors isn't installed.
    """
    path = path.expanduser()
    candidates = [path / name for name in _IN_FOLDER if (path / name).is_file()]
    file = candidates[0] if candidates else path
    if not file.is_file():
        return None
    is_index = file.name.endswith(_INDEX)
    if not is_index and file.suffix not in _SUFFIXES:
        raise CheckpointError(
            f"init_from={path}: a file of weights ends with {', '.join(_SUFFIXES)}. init_from also takes a folder as "
            "transformers saves it, and a run or a checkpoint of this framework."
        )
    files = _indexed(file) if is_index else (file,)
    if files[0].suffix == ".safetensors" and find_spec("safetensors") is None:
        raise ConfigError(f"init_from={path} needs safetensors, which isn't installed: pip install safetensors")
    return files


def _indexed(index: Path) -> tuple[Path, ...]:
    """Return the files that an index of transformers names."""
    try:
        weight_map = read_json(index)["weight_map"]
        names = dict.fromkeys(map(str, weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} can't be read: {error!r}") from error
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing or not names:
        raise CheckpointError(f"{index} names files that aren't there: {', '.join(missing)}. Copy the whole folder.")
    return tuple(index.parent / name for name in names)


def _from_last(folder: Path) -> Iterator[Path]:
    """Yield what `last` names, then the checkpoints of earlier steps, damaged or not, the newest first."""
    last = folder / LAST
    newest = None
    if last.is_symlink():
        target = last.resolve()
        newest = step_of(target.name)
        yield target

    names = [path.name for path in folder.glob("step_*") if not path.is_symlink()]
    for step in sorted(steps_of(names), reverse=True):
        if newest is None or step < newest:
            yield folder / step_name(step)


def _what_is_near(path: Path) -> str:
    """Return what the user may have meant by a path that doesn't exist."""
    folder = next(parent for parent in path.parents if parent.is_dir())
    if (folder / "checkpoints").is_dir():
        folder /= "checkpoints"
    names = sorted(entry.name for entry in folder.iterdir())
    close = nearest(path.name, names)
    if close:
        return f"Did you mean {folder / close}?"
    if not complete_steps(folder):
        return "Name a run, outputs/RECIPE/RUN, or one of its checkpoints. job=runs lists the runs."
    return describe_others(folder / path.name)
