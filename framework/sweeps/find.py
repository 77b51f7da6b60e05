"""Which sweep a path names, and which one is the newest that is unfinished. Runs nothing of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from framework.config.find_run import is_run, suggested_path
from framework.config.overrides import path_argument
from framework.errors import ConfigError
from framework.sweeps.folder import SWEEPS, SweepFolder, SweepPlan
from framework.sweeps.search import is_over
from framework.system.run_dir import read_object

# How trials end that are run again only on request.
_DONE = ("finished", "pruned", "failed")


def is_sweep(place: Path) -> bool:
    """Return True if `place` is the folder of a sweep."""
    # Unlike `Path.is_file`, this raises nothing for a folder that can't be read.
    return os.path.isfile(SweepFolder(place).sweep_file)  # noqa: PTH113


def find_sweep(path: str | Path, *, key: str = "resume") -> SweepFolder:
    """Return the sweep that `path`, given as `key`, is, to continue it. Runs and reads nothing of it.

    Raises ConfigError with a suggestion if it is none, and if a symlink in it could lead what is written elsewhere.
    """
    place = Path(path).expanduser().absolute()
    if not is_sweep(place):
        raise ConfigError(f"{key}={path}: {_why_no_sweep(place, key=key)}{_hint(place, key=key)}")
    folder = SweepFolder(place)
    for part in (place, folder.claims, folder.logs):
        _check_no_symlinks_in(part)
    return folder


def newest_unfinished_sweep(outputs: Path, *, fits: Callable[[SweepFolder], bool]) -> SweepFolder | None:
    """Return the newest sweep in `path.outputs` that has something left to run, and for which `fits` holds.

    None if there is none. It may still be running. Raises ConfigError if the plan of a sweep can't be read.
    """
    sweeps = outputs / SWEEPS
    if not sweeps.is_dir():
        return None
    # The names of sweeps begin with the time.
    for place in sorted(sweeps.iterdir(), reverse=True):
        folder = SweepFolder(place)
        if is_sweep(place) and fits(folder) and _is_unfinished(folder):
            return folder
    return None


def _is_unfinished(folder: SweepFolder) -> bool:
    """Return True if a trial has yet to end, or if a search has some to come."""
    plan = SweepPlan.read(folder)
    if plan.search is not None and not is_over(folder.study_file, n_trials=plan.search.n_trials):
        return True
    for trial in plan.trials:
        record = read_object(folder.trial(trial.number).run_file) or {}
        if record.get("status") not in _DONE:
            return True
    return False


def _why_no_sweep(place: Path, *, key: str) -> str:
    if not os.path.lexists(place):
        return "there is no such folder."
    if not is_run(place):
        return "this is no sweep: it has no sweep.json."
    if key == "resume":
        return "this is one run, not a sweep. Leave -m out to resume it."
    return "this is one run, not a sweep."


def _hint(wrong: Path, *, key: str) -> str:
    """Suggest a sweep in place of the path `wrong`: the one that it lies in, or the nearest one."""
    for place in wrong.parents:
        if is_sweep(place):
            return f"\nIt lies in a sweep: {path_argument(key, place)}"
    return suggested_path(wrong, key=key, find=_sweeps_in, what="sweep")


def _sweeps_in(folder: Path) -> list[Path]:
    files = [*folder.glob("*/sweep.json"), *folder.glob("*/*/sweep.json")]
    return [file.parent for file in files]


def _check_no_symlinks_in(folder: Path) -> None:
    """Raise ConfigError for a symlink: what a continued sweep writes might go to its target."""
    if not os.path.lexists(folder):
        return
    try:
        places = list(folder.iterdir())
    except OSError as error:
        raise ConfigError(f"{folder} can't be read: {error.strerror or error}.") from error
    for place in places:
        if place.is_symlink():
            raise ConfigError(f"{place} is a symlink, and might be written to. Put what it points to in its place.")
