"""What `-m job=plan` prints: the trials of a sweep, the places they run in, and how long it may take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from framework.command.launcher import place
from framework.command.request import Request
from framework.command.slots import Slot, make_slots
from framework.config.schema import Config, SweepConfig
from framework.config.secrets import masked_override
from framework.remote.place import outputs_folder
from framework.runs.find import find_runs
from framework.sweeps.folder import SWEEPS
from framework.sweeps.table import distinguishing
from framework.system.formatting import format_count, format_duration, format_facts, format_table
from framework.system.hardware import count_gpus

# The newest runs of the recipe, by which the time is estimated.
_MAX_RUNS = 5


@dataclass(frozen=True)
class PlannedSweep:
    """Where the trials of a sweep run, and what earlier runs say of their time."""

    # Empty: the GPUs aren't on this machine.
    slots: Sequence[Slot]
    # Of the newest finished runs of the recipe.
    run_seconds: Sequence[float]
    num_trials: int

    @property
    def trial_seconds(self) -> float | None:
        """Return how long a trial may take; None if no run says."""
        return median(self.run_seconds) if self.run_seconds else None

    @property
    def seconds(self) -> float | None:
        """Return how long the sweep may take; None if it isn't known."""
        if self.trial_seconds is None or not self.slots:
            return None
        return self.trial_seconds * math.ceil(self.num_trials / len(self.slots))

    def document(self, requests: Sequence[Request]) -> dict[str, Any]:
        """Return what `format=json` prints as the results."""
        trials = []
        for number, request in enumerate(requests):
            overrides = [masked_override(text) for text in request.overrides]
            trials.append({"trial": number, "overrides": overrides})
        return {
            "trials": trials,
            "at_a_time": len(self.slots) or None,
            "trial_seconds": self.trial_seconds,
            "seconds": self.seconds,
        }


def plan_sweep(requests: Sequence[Request], settings: SweepConfig) -> PlannedSweep:
    """Return the plan of these trials. Raises FrameworkError for what a trial would refuse."""
    topologies = []
    for request in requests:
        # `trainer.gpus` needn't exist here.
        topologies.append(place(request.config, is_swept=True, is_planned=True).topology)
    num_gpus = max(topology.gpus_per_node for topology in topologies)
    slots: Sequence[Slot] = ()
    if num_gpus == 0 or num_gpus <= count_gpus():
        slots = make_slots(topologies, count=len(topologies), jobs=settings.jobs, share_gpus=settings.share_gpus)
    return PlannedSweep(slots, _run_seconds(requests[0].config), num_trials=len(requests))


def sweep_plan_text(requests: Sequence[Request], planned: PlannedSweep) -> str:
    """Return the text for these trials."""
    at_a_time = "unknown: the GPUs aren't on this machine"
    if planned.slots:
        at_a_time = _place_text(planned.slots)

    rows: list[tuple[str, ...]] = [("trial", "overrides")]
    labels = distinguishing([request.overrides for request in requests])
    for number, label in enumerate(labels):
        rows.append((str(number), label))
    facts = [
        ("trials", str(len(requests))),
        ("at a time", at_a_time),
        ("time", _time_text(requests[0].config.recipe, planned)),
    ]
    return f"{format_table(rows)}\n\n{format_facts(facts)}\nNothing was started."


def _place_text(slots: Sequence[Slot]) -> str:
    """Return how many trials run at a time, and on what."""
    first = slots[0]
    on = []
    if first.cores:
        on.append(format_count(len(first.cores), "core"))
    if first.gpus:
        on.append(format_count(len(first.gpus), "GPU"))
    each = f", each on {' and '.join(on)}" if on else ""
    return f"{len(slots)}{each}"


def _run_seconds(config: Config) -> list[float]:
    """Return how long the newest finished runs of a recipe took."""
    outputs = outputs_folder(config.path)
    seconds = []
    for folder in (outputs / config.recipe, outputs / SWEEPS):
        for record in find_runs(folder).records:
            if record.recipe == config.recipe and record.status == "finished" and record.seconds is not None:
                seconds.append((record.started, record.seconds))
    return [duration for _, duration in sorted(seconds)[-_MAX_RUNS:]]


def _time_text(recipe: str, planned: PlannedSweep) -> str:
    """Return an estimate by earlier runs of the same recipe."""
    if planned.trial_seconds is None or planned.seconds is None:
        return f"unknown: there is no finished run of {recipe} to go by"
    total = format_duration(planned.seconds)
    trial = format_duration(planned.trial_seconds)
    runs = format_count(len(planned.run_seconds), "run")
    return f"about {total}, if trials take as long as the last {runs} of {recipe}: {trial}"
