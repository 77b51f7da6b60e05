"""A small search without training: a quadratic function of what was drawn, and what a worker does with it."""

from __future__ import annotations

import os
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from tests.helpers.internals import Asked, OptunaSearch, SearchSettings, SweepFolder, SweepPlan, split_space

OVERRIDES = ("x=interval(-4,4)", "y=tag(log,interval(0.01,100))", "n=int(interval(1,9))", "c=bad,good")
TPE = {"_target_": "optuna.samplers.TPESampler"}
NUM_REPORTS = 3


def settings_of(*overrides: str, **changes: Any) -> SearchSettings:
    _, space = split_space(overrides or OVERRIDES, loader=None)
    values = {"sampler": TPE, "pruner": None, "n_trials": 12, "mode": "min", "seed": 0, **changes}
    return SearchSettings(space=space, **values)


def new_sweep(path: Path, settings: SearchSettings, *, created: str = "2026-01-01T00:00:00") -> SweepFolder:
    """Return the folder of a sweep that has just been planned."""
    path.mkdir(parents=True, exist_ok=True)
    folder = SweepFolder(path)
    plan = SweepPlan(
        created=created,
        arguments=(),
        overrides=(),
        search_path=(),
        job="train",
        recipe="toy",
        monitor="val/loss",
        mode=settings.mode,
        over=(),
        search=settings.plan(),
        trials=(),
    )
    plan.write(folder)
    return folder


def new_search(path: Path, settings: SearchSettings) -> OptunaSearch:
    return OptunaSearch(settings, new_sweep(path, settings))


def loss(asked: Asked) -> float:
    """Return a value that is best, 0, at x=1, y=1, n=3 and c=good."""
    drawn = dict(override.split("=") for override in asked.overrides)
    y = float(drawn.get("y", 1))
    return (
        (float(drawn.get("x", 1)) - 1) ** 2
        + (y - 1) ** 2 / (1 + y**2)
        + (float(drawn.get("n", 3)) - 3) ** 2 / 4
        + (drawn.get("c") == "bad")
    )


def run_trial(search: OptunaSearch, asked: Asked) -> float:
    """Do what a worker does with a trial, and return its value."""
    value = loss(asked)
    for step in range(NUM_REPORTS):
        search.report(asked.index, step=step, value=value + NUM_REPORTS - step)
    search.tell(asked.index, value=value, state="finished")
    return value


def run_all(search: OptunaSearch) -> list[tuple[tuple[str, ...], float]]:
    """Return the overrides and values of all trials."""
    trials: list[tuple[tuple[str, ...], float]] = []
    while (asked := search.ask()) is not None:
        assert asked.index == len(trials)
        trials.append((asked.overrides, run_trial(search, asked)))
    return trials


def work(settings: SearchSettings, folder: SweepFolder, told: Path) -> None:
    """Be a worker in a process of its own: what is open first, then new trials. Each that was told is a line."""
    search = OptunaSearch(settings, folder)
    pending = search.open_trials()
    with told.open("ab", buffering=0) as file:
        while True:
            asked = pending.pop(0) if pending else search.ask()
            if asked is None:
                # The exit of a forked process isn't that of the tests.
                os._exit(0)
            value = run_trial(search, asked)
            file.write(f"{asked.index} {value!r}\n".encode())


def ask_all(settings: SearchSettings, folder: SweepFolder, file: Path, all_are_there: Barrier) -> None:
    """Ask for trials until there are none, and tell nothing; the indices are lines of a file."""
    search = OptunaSearch(settings, folder)
    indices = []
    all_are_there.wait()
    while (asked := search.ask()) is not None:
        indices.append(asked.index)
        # In place of starting the trial.
        time.sleep(0.02)
    file.write_text("".join(f"{index}\n" for index in indices))
    os._exit(0)
