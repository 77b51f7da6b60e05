"""Find the runs in folders, for lists, comparisons and reports. No torch here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from framework.config.saved import is_run
from framework.config.suggest import did_you_mean, nearest
from framework.errors import ConfigError
from framework.runs.record import RunRecord, read_run
from framework.system.formatting import display_path


def find_runs(folder: Path) -> list[RunRecord]:
    """Return the trainings below `folder`, of recipes and of sweeps; not those that job=parity made for itself."""
    records = []
    folders = [folder]
    # Symlinks may lead to the same folder again.
    seen = {folder.resolve()}
    while folders:
        for place in _folders_in(folders.pop()):
            real_place = place.resolve()
            if real_place in seen:
                continue
            seen.add(real_place)
            record = read_run(place)
            if record is None:
                folders.append(place)
            elif record.facts["job"] == "train":
                records.append(record)
    return records


def _folders_in(folder: Path) -> list[Path]:
    """Return the folders in `folder` that may be runs or hold some, symlinks last."""
    if not folder.is_dir():
        return []
    places = [place for place in folder.iterdir() if not place.name.startswith(".") and place.name != "parity"]
    places.sort(key=lambda place: (place.is_symlink(), place))
    return [place for place in places if place.is_dir()]


def named_runs(paths: Sequence[str]) -> list[RunRecord]:
    """Return the runs in `paths`: run directories, and folders of them.

    Raises ConfigError for a path that is neither a run nor a folder with runs.
    """
    records: list[RunRecord] = []
    for text in paths:
        path = Path(text).expanduser().absolute()
        record = read_run(path)
        if record is not None:
            records.append(record)
            continue
        if os.path.lexists(path / "run.json") and is_run(path):
            raise ConfigError(f"runs={text}: the record of this run is damaged. Restore its run.json from a copy.")

        below = find_runs(path)
        if not below:
            hint = ""
            if not path.is_dir():
                hint = _nearest_folder(path)
            raise ConfigError(f"runs={text}: neither a run directory nor a folder with runs.{hint}")
        records += below
    return records


def _nearest_folder(path: Path) -> str:
    """Suggest what lies beside a path that isn't there."""
    beside = []
    if path.parent.is_dir():
        beside = [display_path(place) for place in path.parent.iterdir()]
    return did_you_mean(nearest(display_path(path), beside))
