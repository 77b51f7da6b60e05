"""Find the runs in folders, for lists, comparisons and reports. No torch here."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from framework.config.schema import Config
from framework.config.suggest import did_you_mean, nearest
from framework.errors import ConfigError
from framework.remote.place import RemotePlace, is_url, outputs_folder
from framework.runs.record import DamagedRunError, RunRecord, print_left_out, read_run
from framework.system.formatting import display_path


class FoundRuns(NamedTuple):
    """Runs that can be read, and how many others there are."""

    records: list[RunRecord]
    num_damaged: int = 0


def find_runs(folder: Path) -> FoundRuns:
    """Return the trainings below `folder`, of recipes and of sweeps; not those that job=parity made for itself.

    A line on stderr names each run, and each folder, that can't be read.
    """
    records: list[RunRecord] = []
    num_damaged = 0
    folders = [folder]
    # Symlinks may lead to the same folder again.
    seen = {_real(folder)}
    while folders:
        for place in _folders_in(folders.pop()):
            real_place = _real(place)
            if real_place in seen:
                continue
            seen.add(real_place)
            try:
                record = read_run(place)
            except DamagedRunError as error:
                print_left_out(str(error))
                num_damaged += 1
                continue
            if record is None:
                folders.append(place)
            elif record.facts["job"] == "train" and not _is_of_parity(place):
                records.append(record)
    return FoundRuns(records, num_damaged)


def _folders_in(folder: Path) -> list[Path]:
    """Return the folders in `folder` that may be runs or hold some, symlinks last."""
    if not os.path.isdir(folder):  # noqa: PTH112  # it raises nothing
        return []
    try:
        places = [place for place in folder.iterdir() if not place.name.startswith(".")]
    except OSError as error:
        print_left_out(f"{display_path(folder)} can't be read: {error.strerror or error}.")
        return []
    places.sort(key=lambda place: (place.is_symlink(), _natural(place.name)))
    return [place for place in places if os.path.isdir(place)]  # noqa: PTH112


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts the numbers in names by size: 2 before 10."""
    return [(int(part), part) if part.isdecimal() else (0, part) for part in re.split(r"([0-9]+)", name)]


def _is_of_parity(place: Path) -> bool:
    """Return True for one of the trainings that job=parity compares: RECIPE/parity/DATE/processes/2."""
    is_side = place.parent.name in ("processes", "moved")
    return is_side and place.parents[2].name == "parity"


def _real(place: Path) -> str:
    """Return the path without symlinks. Unlike `Path.resolve`, it raises nothing for a loop of them."""
    return os.path.realpath(place)


def named_place(text: str, *, outputs: Path, key: str = "runs") -> Path:
    """Return the folder that a path or a name is of: that path, or the run or sweep of that name in `outputs`.

    Raises ConfigError, which names `key`, for a name that several have.
    """
    path = Path(text).expanduser().absolute()
    if "/" in text or os.path.lexists(path):
        return path
    places = [folder / text for folder in _folders_in(outputs) if os.path.lexists(folder / text)]
    if len(places) > 1:
        shown = ", ".join(display_path(place) for place in places)
        raise ConfigError(f"{key}={text}: several have this name: {shown}. Type one of these paths.")
    return places[0] if places else path


def named_runs(paths: Sequence[str], *, outputs: Path) -> FoundRuns:
    """Return the runs in `paths`, each once: run directories, and folders of them, such as sweeps.

    Raises ConfigError for a path that is neither a run nor a folder with runs, and for a damaged run.

    Args:
        outputs: `path.outputs`, in which names of runs and sweeps are looked up.
    """
    records: dict[str, RunRecord] = {}
    num_damaged = 0
    for text in paths:
        path = named_place(text, outputs=outputs)
        try:
            record = read_run(path)
        except DamagedRunError as error:
            raise ConfigError(f"runs={text}: {error}\nRestore its files from a copy, or leave it out.") from error
        if record is not None:
            records.setdefault(_real(path), record)
            continue

        found = find_runs(path)
        if not found.records:
            hint = ""
            if not path.is_dir():
                hint = _nearest_folder(path)
            raise ConfigError(f"runs={text}: neither a run directory nor a folder with runs.{hint}")
        for record in found.records:
            records.setdefault(_real(record.run_dir.path), record)
        num_damaged += found.num_damaged
    return FoundRuns(list(records.values()), num_damaged)


def local_runs(config: Config) -> tuple[list[str] | None, Path]:
    """Return `runs.paths` and the folder of `path.outputs`, with the folders that stand for URLs.

    The records at these URLs are fetched. Raises RemoteError if one can't be read.
    """
    outputs = outputs_folder(config.path)
    texts = config.runs.paths
    # A name is looked up there.
    reads_outputs = texts is None or any("/" not in text for text in texts)
    if is_url(config.path.outputs) and reads_outputs:
        _fetch(RemotePlace.of_url(config.path.outputs, cache=config.path.cache))
    if texts is None:
        return None, outputs

    paths = []
    for text in texts:
        if is_url(text):
            place = RemotePlace.of_url(text, cache=config.path.cache)
            _fetch(place)
            text = str(place.local)
        paths.append(text)
    return paths, outputs


def _fetch(place: RemotePlace) -> None:
    from framework.remote.fetch import fetch_records

    fetch_records(place)


def _nearest_folder(path: Path) -> str:
    """Suggest what lies beside a path that isn't there."""
    beside = []
    if path.parent.is_dir():
        beside = [display_path(place) for place in path.parent.iterdir()]
    return did_you_mean(nearest(display_path(path), beside))
