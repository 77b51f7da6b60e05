"""From what someone typed to the directory of one complete checkpoint. Only reads, and imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

from framework.checkpoint.format import (
    BEST,
    LAST,
    MANIFEST_NAME,
    Manifest,
    NewerFormatError,
    decode,
    step_name,
    step_of,
)
from framework.checkpoint.whole import damage
from framework.config.suggest import nearest
from framework.errors import CheckpointError

REPLACED = ".replaced_"
"""Marks a checkpoint set aside while another of the same step takes its place; it counts while its place is empty."""

_NAMES_SHOWN = 8


@final
@dataclass(frozen=True)
class LastWhole:
    """directory: absolute, without symlinks; None where there never was a checkpoint.

    damaged: (directory, what is wrong with it) of each that would have come before it, the newest first.
    """

    directory: Path | None
    damaged: tuple[tuple[Path, str], ...] = ()


def last_whole(folder: Path, *, look: Callable[[Path], str | None] = damage) -> LastWhole:
    """The checkpoint of a checkpoints folder that `last` names, or the newest whole one before it.

    Without a `last` it is the newest of all. One that is newer than `last` is never taken: it may be of training that
    was given up. look: what finds the damage of one. Raises CheckpointError where there are checkpoints and none is
    whole, NewerFormatError where the first that isn't damaged is of a newer framework.
    """
    folder = folder.resolve()
    damaged: dict[Path, str] = {}
    for directory in _from_last(folder):
        fault = look(directory)
        if fault is None:
            return LastWhole(directory.resolve(), tuple(damaged.items()))
        damaged[directory] = fault
    if not damaged:
        return LastWhole(None)
    newer = [path.name for path, _ in complete_steps(folder).values() if path not in damaged]
    what_to_do = "Bring one back from a copy, or begin a new run."
    if newer:
        what_to_do = f"Newer than `{LAST}` there is {', '.join(newer[-_NAMES_SHOWN:])}: resume={folder / newer[-1]}"
    lines = "".join(f"  {directory.name}: {fault}\n" for directory, fault in damaged.items())
    raise CheckpointError(f"No checkpoint in {folder} is whole:\n{lines}{what_to_do}")


def find(path: Path) -> Path:
    """The step directory that `path` means, as an absolute path without symlinks.

    path: a run directory or its checkpoints folder (both mean `last`), a step directory, or a pointer such as `best`,
    which may also be written right behind the run directory. Raises CheckpointError, naming what is there, where
    there is none, or where the one that is meant isn't complete: another is never taken in its place.
    """
    path = path.expanduser()
    if not _is_there(path) and _is_there(path.parent / "checkpoints" / path.name):
        path = path.parent / "checkpoints" / path.name
    if path.is_symlink() and not path.exists():
        return _follow_dangling(path)
    if path.is_file():
        raise CheckpointError(_not_a_directory(path))
    if not path.is_dir():
        raise CheckpointError(f"There is no {path}.\n{_what_is_near(path)}")
    path = path.resolve()
    if (path / MANIFEST_NAME).exists() or step_of(path.name) is not None:
        read_manifest(path)
        return path
    return _find_last(path)


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a step directory. Raises CheckpointError where it is missing, damaged or of a newer format."""
    try:
        text = (directory / MANIFEST_NAME).read_text()
    except FileNotFoundError as error:
        raise CheckpointError(
            f"The checkpoint {directory} is not complete: it has no {MANIFEST_NAME}.\n{describe_others(directory)}"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"The checkpoint {directory} is damaged: its {MANIFEST_NAME} can't be read ({error}).\n"
            f"{describe_others(directory)}"
        ) from error
    try:
        return decode(text, directory=directory)
    except CheckpointError as error:
        raise CheckpointError(f"{error}\n{describe_others(directory)}") from error


def complete_steps(folder: Path) -> dict[int, tuple[Path, Manifest]]:
    """Every complete checkpoint of a checkpoints folder: step → (directory, manifest), in the order of steps.

    Complete by its manifest and the files' sizes; whether their content is as it was written only `damage` knows.
    """
    found = dict(_complete_among(folder, prefix=REPLACED))
    found.update(_complete_among(folder, prefix=""))
    return dict(sorted(found.items()))


def describe_others(directory: Path) -> str:
    """What else there is beside a checkpoint that can't be used, and so what to do."""
    others = [path.name for path, _ in complete_steps(directory.parent).values() if path.name != directory.name]
    if not others:
        return "There is no other complete checkpoint beside it."
    return f"Use another one of {directory.parent}: {', '.join(others[-_NAMES_SHOWN:])}"


def _complete_among(folder: Path, *, prefix: str) -> Iterator[tuple[int, tuple[Path, Manifest]]]:
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        step = step_of(path.name[len(prefix) :]) if path.name.startswith(prefix) else None
        if step is None or path.is_symlink():
            continue
        manifest = manifest_if_complete(path)
        # A directory that was renamed by hand would be taken for another step, and deleted as that.
        if manifest is not None and manifest.step == step and _has_its_sizes(path):
            yield step, (path, manifest)


def manifest_if_complete(directory: Path) -> Manifest | None:
    try:
        return decode((directory / MANIFEST_NAME).read_text(), directory=directory)
    except (OSError, ValueError, CheckpointError):
        return None


def _has_its_sizes(directory: Path) -> bool:
    try:
        return damage(directory, thorough=False) is None
    except NewerFormatError:
        return False


def _from_last(folder: Path) -> Iterator[Path]:
    """What `last` names and the checkpoints of earlier steps, whole or not, the newest first.

    One that was set aside comes behind the one in its place.
    """
    if not folder.is_dir():
        return
    pointer, first, newest = folder / LAST, None, None
    if pointer.is_symlink():
        first = pointer.resolve()
        newest = step_of(first.name)
    elif pointer.is_dir():  # in a copy that was made by following symlinks
        first, manifest = pointer, manifest_if_complete(pointer)
        newest = None if manifest is None else manifest.step
    if first is not None:
        yield first
    found = {step_of(path.name.removeprefix(REPLACED)) for path in folder.iterdir() if not path.is_symlink()}
    for step in sorted((step for step in found if step is not None), reverse=True):
        for path in (folder / step_name(step), folder / (REPLACED + step_name(step))):
            if path != first and path.exists() and (newest is None or step <= newest):
                yield path


def _find_last(path: Path) -> Path:
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if _is_there(folder / LAST):
        return find(folder / LAST)
    # Only where the pointer was lost: in a kill before the first one was made, or by a copy that skipped symlinks.
    complete = complete_steps(folder)
    if complete:
        return complete[max(complete)][0]
    raise CheckpointError(f"There is no complete checkpoint in {folder}.\n{_what_is_in(folder)}")


def _follow_dangling(pointer: Path) -> Path:
    target = pointer.parent / pointer.readlink()
    aside = target.with_name(REPLACED + target.name)
    if manifest_if_complete(aside) is not None:
        return aside.resolve()
    raise CheckpointError(
        f"{pointer} points to {target.name}, which is gone.\n{describe_others(pointer.parent / target.name)}"
    )


def _not_a_directory(file: Path) -> str:
    if (file.parent / MANIFEST_NAME).is_file():
        return f"{file} is one file of a checkpoint, which is a directory. Use {file.parent}."
    return (
        f"{file} is a file. init_from and checkpoint.path take a checkpoint of this framework, which is a directory:\n"
        "outputs/RECIPE/RUN for the run's last one, or one of outputs/RECIPE/RUN/checkpoints, such as best."
    )


def _is_there(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _what_is_near(path: Path) -> str:
    parent = path.parent
    while not parent.is_dir() and parent != parent.parent:
        parent = parent.parent
    folder = parent / "checkpoints" if (parent / "checkpoints").is_dir() else parent
    return _what_is_in(folder, wanted=path.name)


def _what_is_in(folder: Path, *, wanted: str | None = None) -> str:
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    if not names:
        return f"{folder} is empty: the run ended before its first checkpoint."
    if wanted is not None and (close := nearest(wanted, names)):
        return f"Did you mean {folder / close}?"
    pointers = [name for name in (BEST, LAST) if name in names]
    steps = [step_name(step) for step in complete_steps(folder)]
    shown = pointers + steps[-_NAMES_SHOWN:] or names[:_NAMES_SHOWN]
    return f"In {folder} there is: {', '.join(shown)}"
