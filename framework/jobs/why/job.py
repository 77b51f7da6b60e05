"""`job=why`: where a run went wrong, or where two runs begin to differ. No torch here.

    job=why run=RUN                        the first step that isn't finite, its layer and its samples
    job=why run=RUN why.step=N             what is out of the ordinary in a step
    job=why run=RUN why.metric=train/loss  the same for the step in which a logged metric leaps most
    job=why runs=[A,B]                     the first step and tensor in which two runs differ, and why

Steps are repeated from a checkpoint, in a directory of their own; nothing is added to the runs. The answer is printed,
and written to why.json. Of one run it has these keys:

    run, recipe
    repeated    for each repetition: `checkpoint` (null: from scratch), `from_step` and `until`
    fault       null if there is none; else step, rank, micro_batch, objective, direction (forward, backward, update),
                kind, layer, type, inside, after, dtype, values, cause (sample, activation, layer, loss,
                learning_rate, gradient, update), samples (index, row, length), num_samples, evidence
    changes     what has changed since the run, that may give other numbers
    text        the paragraph that is printed

Exit status 0: a fault or a difference was found; 1: none was, or a training failed; 2: the runs can't be looked into.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from framework.command.job import Job
from framework.command.request import JobResult, Request
from framework.config.overrides import path_argument
from framework.config.schema import Config
from framework.errors import ConfigError
from framework.jobs.replay.changes import changes_since
from framework.jobs.replay.training import last_step
from framework.jobs.why.repeating import Repeated, described, fault_watch, repeat, sample_search, start_before
from framework.jobs.why.two_runs import compare_two
from framework.remote.place import outputs_folder
from framework.runs.record import RunRecord, read_run
from framework.runs.segments import segment_at
from framework.system.formatting import display_path, format_count
from framework.system.run_dir import new_name, read_object, write_object
from framework.system.shown_text import shown

# Steps before a fault that are repeated, too, to know what is usual.
_BEFORE = 16
# How often the repetition begins at an earlier checkpoint.
_TRIES = 3


class Why(Job):
    """Find where a run went wrong, or where two runs begin to differ."""

    # The trainings have ranks of their own.
    needs_ranks = False
    takes_run = True
    sweepable = False
    sections = ("why", "runs")

    def mistakes(self, config: Config) -> Iterator[str]:
        one = config.run is not None
        two = config.runs.paths is not None
        if one is two:
            yield "job=why needs run=RUN, or two runs: runs=[A,B]. job=runs lists the runs."
        if two and len(config.runs.paths or ()) != 2:
            yield f"job=why compares two runs, and runs has {len(config.runs.paths or ())}. Type runs=[A,B]."
        if config.step is not None or config.rank is not None:
            yield "step and rank are for job=replay. Type why.step=N to look into a step."
        if config.why.step is not None and config.why.metric is not None:
            yield "why.step and why.metric both name a step. Leave one of them out."
        if two and (config.why.step is not None or config.why.metric is not None):
            yield "why.step and why.metric are for one run. With runs=[A,B], the first difference is looked for."

    def run(self, request: Request) -> JobResult:
        """Repeat, print and write the answer. Raises FrameworkError for what can't be repeated."""
        config = request.config
        if request.external_ranks is not None:
            raise ConfigError(
                "job=why starts processes of its own, on one machine.\nRun the command once, without torchrun or srun."
            )
        folder = outputs_folder(config.path)
        if config.run is None:
            folder = folder / "why" / new_name()
            content = compare_two(request, folder=folder)
            is_found = content["difference"] is not None
        else:
            record = read_run(Path(config.run))
            if record is None:
                raise ConfigError(f"run={config.run}: the run has only just begun.")
            folder = folder / record.recipe / "why" / new_name()
            content = _of_one(request, record, folder=folder)
            is_found = content["fault"] is not None
        for place in folder.glob("training_*"):
            # What was trained is of no use, and may be large.
            shutil.rmtree(place)
        file = folder / "why.json"
        folder.mkdir(parents=True, exist_ok=True)
        write_object(file, content)
        print(shown(f"\n{content['text']}\n\n  {display_path(file)}"), flush=True)
        return JobResult(0 if is_found else 1, results={**content, "output": display_path(file)})

    def document(self, request: Request, result: JobResult) -> Any:
        return result.results


def _of_one(request: Request, record: RunRecord, *, folder: Path) -> dict[str, Any]:
    """Return the answer about one run."""
    settings = request.config.why
    first, last = _steps(record, step=settings.step, metric=settings.metric)
    is_nonfinite = first is None
    start = start_before(record, (first or last) - _BEFORE, until=first or last)
    if is_nonfinite:
        start = start_before(record, last, until=last)
    watch = fault_watch(first=first, last=last)
    if is_nonfinite:
        watch = fault_watch()

    repetitions: list[Repeated] = []
    fault: dict[str, Any] | None = None
    for number in range(_TRIES):
        repeated = repeat(request, record, start, until=last, callback=watch, folder=folder / f"training_{number}")
        repetitions.append(repeated)
        fault = _first_fault(repeated.ranks)
        # It may only show what an earlier step has done.
        is_early = fault is not None and fault["step"] <= start.step + 2
        is_consequence = is_early or any(rank["weights_leap"] for rank in repeated.ranks)
        earlier = start_before(record, start.step, until=last)
        if not is_consequence or earlier.step == start.step:
            break
        start = earlier

    if fault is not None and _needs_samples(fault):
        # The place is known, and what tells the samples apart takes a look before the step.
        start = start_before(record, fault["step"], until=fault["step"])
        looking = sample_search(fault)
        place = folder / "training_samples"
        repeated = repeat(request, record, start, until=fault["step"], callback=looking, folder=place)
        repetitions.append(repeated)
        for rank in repeated.ranks:
            if rank["fault"] is not None:
                fault = rank["fault"]

    changes = changes_since(segment_at(record.run_dir, last))
    return {
        "run": record.run,
        "recipe": record.recipe,
        "repeated": [described(repeated) for repeated in repetitions],
        "fault": fault,
        "changes": changes,
        "text": _text(record, repetitions[-1], fault, changes, is_nonfinite=is_nonfinite),
    }


def _steps(record: RunRecord, *, step: int | None, metric: str | None) -> tuple[int | None, int]:
    """Return the first and the last step to look into; None and the last one to repeat for a run that isn't finite."""
    last = last_step(record)
    if step is not None:
        if step > last:
            raise ConfigError(f"why.step={step}: {record.run} has made {last} steps, as far as its records show.")
        return step, step
    if metric is not None:
        return _leap(record, metric)
    failure = read_object(record.run_dir.path / "failure.json") or {}
    first = failure.get("first") or {}
    if "NotFiniteError" not in str(first.get("traceback")):
        advice = "Name what to look into: why.step=N, or why.metric=train/loss for the step in which it leaps."
        if first.get("exception") is not None:
            reason = str(first["exception"]).splitlines()[0].rstrip(".")
            step = int(first["step"]) + 1
            run = path_argument("run", record.run)
            advice = f"It failed: {reason}.\nTo see that step: python -m framework job=replay {run} step={step}"
        raise ConfigError(f"{record.run} didn't end because a loss or weight wasn't finite. {advice}")
    return None, int(first["step"])


def _leap(record: RunRecord, metric: str) -> tuple[int, int]:
    """Return the steps of the logging interval in which a metric differs most from those around it."""
    rows = [(int(row["step"]), row[metric]) for row in record.rows(having=metric)]
    if not rows:
        raise ConfigError(f"why.metric={metric}: {record.run} hasn't logged it. Use train/loss, or why.step=N.")
    steps = [number for number, _ in rows]
    values = [math.inf if value is None else float(value) for _, value in rows]
    position = max(range(len(rows)), key=lambda number: _leap_at(values, number))
    begin = steps[position - 1] if position else 0
    return begin + 1, steps[position]


def _leap_at(values: Sequence[float], position: int) -> float:
    """Return how far a value is from the median of the four nearest to it."""
    value = values[position]
    if not math.isfinite(value):
        return math.inf
    begin = max(0, min(position - 2, len(values) - 5))
    others = [other for number, other in enumerate(values[begin : begin + 5], start=begin) if number != position]
    if not others:
        return 0.0
    distance = abs(value - median(others))
    return distance if math.isfinite(distance) else 0.0


def _first_fault(ranks: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    faults = [rank["fault"] for rank in ranks if rank["fault"] is not None]
    if not faults:
        return None
    first: dict[str, Any] = dict(min(faults, key=lambda fault: fault["order"]))
    del first["order"]
    return first


def _needs_samples(fault: Mapping[str, Any]) -> bool:
    """Return True if no row of the micro-batch was told from the others."""
    if fault["micro_batch"] is None or fault["num_samples"] < 2:
        return False
    return fault["samples"] is None or len(fault["samples"]) == fault["num_samples"]


def _text(
    record: RunRecord,
    repeated: Repeated,
    fault: dict[str, Any] | None,
    changes: Sequence[str],
    *,
    is_nonfinite: bool,
) -> str:
    lines = []
    if fault is not None:
        text = fault.pop("text")
        lines.append(f"{text[0].upper()}{text[1:]}")
        lines.append(f"To see that step: python -m framework job=replay run={record.run} step={fault['step']}")
    elif is_nonfinite:
        steps = format_count(repeated.until - repeated.start.step, "step")
        lines.append(
            f"Repeated, the {steps} stay finite. So neither the data nor the settings are the cause: something has "
            "changed since (see below), or a device computed wrongly."
        )
    else:
        largest = repeated.ranks[0]["largest"]
        lines.append(f"Nothing stands out in step {repeated.ranks[0]['step']:,}, compared with the steps before.")
        if largest is not None:
            factor = largest["factor"]
            lines.append(f"Farthest from them is {_place(largest)}: {factor:.3g} times as large as in any of them.")
    lines += [f"Changed since the run: {change}" for change in changes]
    return "\n".join(lines)


def _place(largest: Mapping[str, Any]) -> str:
    """Return what was measured, in words."""
    layer = largest["layer"] or "the model"
    place = f"the {largest['kind']} of {layer}"
    if largest["kind"] in ("batch", "parameter"):
        place = layer
    if largest["kind"] == "loss":
        place = "the loss"
    if largest["direction"] == "backward":
        return f"the gradient of {place}"
    return place
