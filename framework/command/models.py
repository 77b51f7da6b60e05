"""The models that one command evaluates: those of the runs, checkpoints and sweeps in `checkpoint.path`.

python -m framework -m job=eval checkpoint.path=SWEEP
python -m framework -m job=eval checkpoint.path=RUN,RUN,SWEEP
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from framework.config.hydra_compose import split_sweep, value_of
from framework.config.overrides import key_of, path_argument
from framework.errors import ConfigError
from framework.sweeps.find import find_sweep, is_sweep
from framework.sweeps.folder import SweepFolder, SweepPlan
from framework.sweeps.results import read_results
from framework.system.formatting import display_path, format_count
from framework.system.run_dir import RunDir
from framework.system.shown_text import shown

KEY = "checkpoint.path"


def typed_models(typed: Sequence[str], *, fetched: Callable[[str], str]) -> list[str]:
    """Return an override `checkpoint.path=PATH` for each model; none if one run or checkpoint is typed, or nothing.

    A sweep stands for the best checkpoint of each of its trials that has one; the other trials are named on standard
    error. Raises ConfigError if nothing remains.

    fetched: returns the local path of one that a URL names, and other paths as they are.
    """
    texts = [text for text in typed if key_of(text) == KEY]
    if not texts:
        return []
    paths = _paths(texts[-1])
    if len(paths) == 1 and not is_sweep(Path(paths[0])):
        return []
    models: dict[str, None] = {}
    for path in paths:
        places = _trials_of(path) if is_sweep(Path(path)) else [fetched(path)]
        models |= dict.fromkeys(places)
    if not models:
        raise ConfigError(f"{texts[-1]}: no trial of the sweep has a checkpoint yet.")
    return [model_override(path) for path in models]


def model_override(path: str | Path) -> str:
    """Return `checkpoint.path=PATH`, quoted for Hydra."""
    (override,) = shlex.split(path_argument(KEY, path))
    return override


def _paths(override: str) -> list[str]:
    """Return the paths that an override lists, as `A,B` or `[A,B]`."""
    paths: list[str] = []
    for (one,) in split_sweep([override]):
        value: Any = value_of(one)
        for path in value if isinstance(value, list) else [value]:
            if not isinstance(path, str) or not path:
                raise ConfigError(
                    f"{override}: must name runs, checkpoints or sweeps, such as {KEY}=outputs/RECIPE/RUN."
                )
            paths.append(path)
    return paths


def _trials_of(path: str) -> list[str]:
    """Return the best checkpoint of each trial of a sweep; print which trials have none."""
    folder = find_sweep(path, key=KEY)
    plan = SweepPlan.read(folder)
    places = []
    without = []
    for result in read_results(folder, plan.trials):
        place = _checkpoint_of(folder, result.number)
        if place is None:
            without.append(f"{result.number} ({result.status})")
        else:
            places.append(place)
    if without:
        count = format_count(len(without), "trial")
        text = f"{display_path(folder.path)}: {count} without a checkpoint left out: {', '.join(without)}"
        print(shown(text), file=sys.stderr, flush=True)
    return places


def _checkpoint_of(folder: SweepFolder, number: int) -> str | None:
    """Return the best checkpoint of a trial, the last one if no metric says which is best; None if it has none."""
    checkpoints = RunDir(folder.trial(number).path).checkpoints
    for name in ("best", "last"):
        if os.path.isdir(checkpoints / name):  # noqa: PTH112  # it raises nothing
            return display_path(checkpoints / name)
    return None
