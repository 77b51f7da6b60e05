"""What `-m job=plan` prints: the trials of a sweep, the places they run in, and how long it may take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from framework.command.launcher import place
from framework.command.request import Request
from framework.command.slots import Slot, make_slots
from framework.config.schema import SweepConfig
from framework.remote.place import outputs_folder
from framework.runs.find import find_runs
from framework.sweeps.folder import SWEEPS
from framework.sweeps.table import distinguishing
from framework.system.formatting import format_count, format_duration, format_facts, format_table
from framework.system.hardware import count_gpus

# The newest runs of the recipe, by which the time is estimated.
_MAX_RUNS = 5


def sweep_plan_text(requests: Sequence[Request], settings: SweepConfig) -> str:
    """Return the text for these trials. Raises FrameworkError for what a trial would refuse."""
    topologies = []
    for request in requests:
        # `trainer.gpus` needn't exist here.
        topologies.append(place(request.config, is_swept=True, is_planned=True).topology)
    num_gpus = max(topology.gpus_per_node for topology in topologies)
    slots: Sequence[Slot] = ()
    at_a_time = "unknown: the GPUs aren't on this machine"
    if num_gpus == 0 or num_gpus <= count_gpus():
        slots = make_slots(topologies, count=len(topologies), jobs=settings.jobs, share_gpus=settings.share_gpus)
        at_a_time = _place_text(slots)

    rows: list[tuple[str, ...]] = [("trial", "overrides")]
    labels = distinguishing([request.overrides for request in requests])
    for number, label in enumerate(labels):
        rows.append((str(number), label))
    facts = [
        ("trials", str(len(requests))),
        ("at a time", at_a_time),
        ("time", _time_text(requests, num_slots=len(slots))),
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


def _time_text(requests: Sequence[Request], *, num_slots: int) -> str:
    """Return an estimate by earlier runs of the same recipe."""
    config = requests[0].config
    outputs = outputs_folder(config.path)
    seconds = []
    for folder in (outputs / config.recipe, outputs / SWEEPS):
        for record in find_runs(folder).records:
            if record.recipe == config.recipe and record.status == "finished" and record.seconds is not None:
                seconds.append((record.started, record.seconds))
    if not seconds or not num_slots:
        return f"unknown: there is no finished run of {config.recipe} to go by"
    newest = [duration for _, duration in sorted(seconds)[-_MAX_RUNS:]]
    trial_s = median(newest)
    total = format_duration(trial_s * math.ceil(len(requests) / num_slots))
    runs = format_count(len(newest), "run")
    return f"about {total}, if trials take as long as the last {runs} of {config.recipe}: {format_duration(trial_s)}"
