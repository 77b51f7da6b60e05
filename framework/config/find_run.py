"""Which run a path means: the run directory that it is or lies in, or a recipe's newest unfinished run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from framework.config.overrides import path_argument
from framework.config.suggest import nearest
from framework.config.yaml_files import load_as
from framework.errors import ConfigError
from framework.system.run_dir import RunDir, read_object


def is_run(place: Path) -> bool:
    """Return True if `place` is a run directory. Other folders may have a config.yaml, but not both files."""
    run_dir = RunDir(place)
    # Unlike `Path.is_file`, these raise nothing for a folder that can't be read.
    return os.path.isfile(run_dir.config_file) and os.path.isfile(run_dir.overrides_file)  # noqa: PTH113


def run_of(path: str | Path, *, key: str = "resume") -> RunDir:
    """Return the run that `path`, given as `key`, is or lies in. Raises ConfigError with a suggestion otherwise."""
    place = Path(path).expanduser().absolute()
    # The symlink `last` of a checkpoint that is gone still names the run.
    if not place.exists() and not place.is_symlink():
        raise ConfigError(f"{key}={path}: there is no such directory.{_hint(place, key=key)}")
    for folder in (place, *place.parents):
        if is_run(folder):
            return RunDir(folder)
    raise ConfigError(
        f"{key}={path}: not a run directory: it has no config.yaml and overrides.yaml.{_hint(place, key=key)}"
    )


def newest_unfinished(folder: Path, *, is_own: Callable[[RunDir], bool] = lambda _: True) -> RunDir | None:
    """Return the newest unfinished training run in a recipe's folder for which `is_own` holds; None if there is none.

    It may still be running: then `locked` refuses it.
    """
    if not folder.is_dir():
        return None
    # The names of run directories begin with the time.
    for place in sorted(folder.iterdir(), reverse=True):
        run_dir = RunDir(place)
        if _is_unfinished(run_dir) and is_own(run_dir):
            return run_dir
    return None


def _is_unfinished(run_dir: RunDir) -> bool:
    """Return True for a training that hasn't finished. Raises RequestError if `run.json` is damaged."""
    # It isn't a run, or it was killed while it was created.
    if not is_run(run_dir.path) or not run_dir.run_file.exists():
        return False
    record = run_dir.read_run()
    if record.get("status") == "finished":
        return False
    if "job" in record:
        return bool(record["job"] == "train")
    # Runs of earlier versions have no job in their record.
    raw = load_as(run_dir.config_file, dict)
    return bool(raw.get("job") == "train")


def _hint(wrong: Path, *, key: str) -> str:
    return suggested_path(wrong, key=key, find=_training_runs)


def suggested_path(wrong: Path, *, key: str, find: Callable[[Path], list[Path]], what: str = "run") -> str:
    """Return, on a new line, what may be meant by the path `wrong`: the nearest name, or the newest in a folder.

    Args:
        find: returns what there is in a folder and in its folders.
        what: what that is.
    """
    # Unlike `Path.is_dir`, this raises nothing for a folder that can't be read.
    folder = next(place for place in (wrong, *wrong.parents) if os.path.isdir(place))  # noqa: PTH112
    if folder == folder.parent:
        return ""
    places = find(folder)
    if not places:
        return ""
    if folder == wrong:
        newest = max(places, key=lambda place: place.name)
        return f"\nThe newest {what} in it: {path_argument(key, newest)}"
    guess = nearest(str(wrong), map(str, places))
    if guess is None:
        return ""
    return f"\nDid you mean {path_argument(key, guess)}?"


def _training_runs(folder: Path) -> list[Path]:
    """Return the training runs in a folder and in its folders."""
    runs = []
    for pattern in ("*/overrides.yaml", "*/*/overrides.yaml"):
        for file in folder.glob(pattern):
            record = read_object(RunDir(file.parent).run_file) or {}
            # A record of an earlier version has no job.
            if record.get("job", "train") == "train":
                runs.append(file.parent)
    return runs
