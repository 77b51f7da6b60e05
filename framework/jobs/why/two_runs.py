"""The first step and tensor in which two runs differ, and what differs between them. No torch here.

The answer, why.json, has these keys:

    runs         the two runs
    difference   null if nothing differs; else
                 step       the first one
                 logged     the first step whose logged values differ, and `name` and `values` of the first of them;
                            null if none does
                 what       "data", "tensor", or "logged": only the logs differ, and repeated, both runs are the same
                 rank, micro_batch
                 samples    of data: those of each run that the other one hasn't, by index
                 place      of a tensor: direction, kind, layer, type, and `rows`, those of the samples that differ
    repeated     of each run: checkpoint, from_step and until
    sections     configuration, code, modules and versions: by name, the values of both
    text         the paragraph that is printed
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from framework.command.request import Request
from framework.command.trust import check_trust
from framework.config.saved import load_rerun
from framework.errors import ConfigError
from framework.jobs.replay.training import Start, last_step
from framework.jobs.why.repeating import Repeated, described, repeat, start_before, trace
from framework.remote.place import outputs_folder
from framework.runs.compare import cell, compare
from framework.runs.find import local_runs, named_runs
from framework.runs.record import RunRecord
from framework.runs.segments import segment_at
from framework.system.formatting import format_numbers

_SHOWN = 12
# Logged values that depend on what was computed alone.
_NOT_COMPUTED = ("_per_s", "/mfu", "time/", "memory", "device/", "wait")


def compare_two(request: Request, *, folder: Path) -> dict[str, Any]:
    """Repeat both runs around the first step that differs, and return the answer.

    Raises FrameworkError for runs that can't be repeated.
    """
    records = _records(request)
    sections = _sections(records)
    logged = _first_logged(records)
    until = min(last_step(record) for record in records)
    if logged is not None:
        until = min(until, logged["step"])
    equal_until = 0 if logged is None else logged["equal_until"]
    starts = _common_starts(records, equal_until + 1, until=until)

    while True:
        repetitions = []
        for name, record, start in zip("ab", records, starts, strict=True):
            place = folder / f"training_{name}_{start.step}"
            repetitions.append(repeat(request, record, start, until=until, callback=trace(), folder=place))
        difference = _first_difference(repetitions)
        is_at_start = difference is not None and difference["step"] <= starts[0].step
        earlier = _common_starts(records, starts[0].step, until=until)
        if not is_at_start or earlier == starts:
            break
        # They differed before.
        starts = earlier

    if difference is None and logged is not None:
        difference = {"what": "logged", "step": logged["step"]}
    if difference is not None:
        difference["logged"] = logged
    return {
        "runs": [record.run for record in records],
        "difference": difference,
        "repeated": [described(repeated) for repeated in repetitions],
        "sections": sections,
        "text": "\n".join(_lines(difference, sections, until=until)),
    }


def _records(request: Request) -> Sequence[RunRecord]:
    """Return the two runs, whose code may be run. Raises ConfigError."""
    paths, outputs = local_runs(request.config)
    records = named_runs(paths or (), outputs=outputs).records
    if len(records) != 2:
        raise ConfigError(f"job=why compares two runs, and these are {len(records)}. Type runs=[RUN,RUN].")
    for record in records:
        found = load_rerun(record.run_dir.path, key="runs")
        if not request.config.trust:
            check_trust(found, outputs=[outputs_folder(request.config.path)], asked_by="type trust=true")
    return records


def _sections(records: Sequence[RunRecord]) -> dict[str, dict[str, list[Any]]]:
    """Return what differs between the runs, as they were started last."""
    compared = compare(records)
    sections = {name: dict(compared.get(name, {})) for name in ("configuration", "code", "versions")}
    hashes = [segment_at(record.run_dir, max(1, last_step(record))).modules for record in records]
    modules = {}
    for name in sorted({*hashes[0], *hashes[1]}):
        values = [of_run.get(name) for of_run in hashes]
        if values[0] != values[1]:
            modules[name] = values
    return {**sections, "modules": modules}


def _first_logged(records: Sequence[RunRecord]) -> dict[str, Any] | None:
    """Return the first logged values of training that differ; None if all are equal as far as both have logged."""
    of_runs = [_logged(record) for record in records]
    equal_until = 0
    for step in sorted(of_runs[0].keys() & of_runs[1].keys()):
        one = of_runs[0][step]
        other = of_runs[1][step]
        for name in one:
            if name in other and one[name] != other[name]:
                return {"step": step, "equal_until": equal_until, "name": name, "values": [one[name], other[name]]}
        equal_until = step
    return None


def _logged(record: RunRecord) -> dict[int, dict[str, Any]]:
    """Return what a run has logged of its steps; texts for numbers that aren't finite."""
    values: dict[int, dict[str, Any]] = {}
    for row in record.rows():
        row = row | row.get("nonfinite", {})
        of_step = values.setdefault(int(row["step"]), {})
        for name, value in row.items():
            is_computed = name.startswith("train/") and not any(part in name for part in _NOT_COMPUTED)
            if is_computed:
                of_step[name] = value
    return {step: of_step for step, of_step in sorted(values.items()) if of_step}


def _common_starts(records: Sequence[RunRecord], step: int, *, until: int) -> list[Start]:
    """Return a checkpoint of the same step of each run, before `step`; from scratch if they have none.

    If one of them is a branch that has none so early, the steps differ. Raises ConfigError if no step up to `until` is
    in both runs.
    """
    for record in records:
        branch = record.facts.get("branch_of")
        if branch is None:
            continue
        if branch["step"] >= until:
            raise ConfigError(
                f"{record.run} begins after step {branch['step']:,} of {branch['run']}, and there is no step after it "
                "in both runs. job=compare shows their results."
            )
        step = max(step, branch["step"] + 1)
    starts = [start_before(record, step, until=until) for record in records]
    while starts[0].step != starts[1].step:
        earliest = min(start.step for start in starts)
        earlier = [start_before(record, earliest + 1, until=until) for record in records]
        if earlier == starts:
            break
        starts = earlier
    return starts


def _first_difference(repetitions: Sequence[Repeated]) -> dict[str, Any] | None:
    """Return the first step in which what was repeated differs, and where; None if nothing differs."""
    of_runs = [[_by_step(rank) for rank in repeated.ranks] for repeated in repetitions]
    begun = [repeated.start.step for repeated in repetitions]
    steps = of_runs[0][0].keys() & of_runs[1][0].keys()
    if begun[0] != begun[1]:
        # What one run began with is no step of it.
        steps -= {*begun}
    for step in sorted(steps):
        step_of_runs = []
        for of_run in of_runs:
            step_of_runs.append([rank[step] for rank in of_run if step in rank])
        difference = _of_step(step_of_runs)
        if difference is not None:
            return {"step": step, **difference}
    return None


def _by_step(rank: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    return {step["step"]: step for step in rank["steps"]}


def _of_step(of_runs: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any] | None:
    """Return what differs in a step: which samples it took, or else the first tensor."""
    samples = [sorted(_samples(of_run)) for of_run in of_runs]
    if samples[0] != samples[1]:
        only = [sorted({*samples[0]} - {*samples[1]}), sorted({*samples[1]} - {*samples[0]})]
        return {"what": "data", "rank": None, "micro_batch": None, "samples": only}
    for rank, (one, other) in enumerate(zip(*of_runs, strict=False)):
        if one["indices"] != other["indices"]:
            return {"what": "data", "rank": rank, "micro_batch": None, "samples": [[], []]}

    firsts = []
    for rank, (one, other) in enumerate(zip(*of_runs, strict=False)):
        for position, (event, twin) in enumerate(zip(one["events"], other["events"], strict=False)):
            if event["place"] != twin["place"] or event["sizes"] != twin["sizes"]:
                firsts.append((position, rank, event, twin, one))
                break
    if not firsts:
        return None
    _, rank, event, twin, step = min(firsts, key=lambda first: first[:2])
    direction, kind, layer, _, micro_batch = event["place"]
    place = {"direction": direction, "kind": kind, "layer": layer, "type": event["type"], "rows": None}
    indices = None
    if len(event["sizes"]) > 1 and len(event["sizes"]) == len(twin["sizes"]):
        rows = [row for row, size in enumerate(event["sizes"]) if size != twin["sizes"][row]]
        place["rows"] = rows
        taken = step["indices"][micro_batch]
        if taken is not None and len(rows) < len(event["sizes"]):
            indices = [taken[row] for row in rows]
    number = micro_batch if micro_batch >= 0 else None
    return {"what": "tensor", "rank": rank, "micro_batch": number, "place": place, "samples": indices}


def _samples(steps: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the samples of all ranks and micro-batches."""
    samples: list[int] = []
    for step in steps:
        for indices in step["indices"]:
            samples += indices or []
    return samples


def _lines(
    difference: Mapping[str, Any] | None,
    sections: Mapping[str, Mapping[str, Sequence[Any]]],
    *,
    until: int,
) -> Iterator[str]:
    if difference is None:
        yield f"The same: repeated until step {until:,}, all tensors are equal, and so is what both have logged."
    else:
        yield f"The first difference is in {_what(difference)}."
        logged = difference["logged"]
        if logged is not None:
            numbers = " and ".join(map(str, logged["values"]))
            yield f"Logged, {logged['name']} differs first at step {logged['step']:,}: {numbers}."
        if difference["what"] == "logged":
            yield (
                "Repeated with the code and versions of today, both give the same values. So the data and the settings "
                "are equal: code, versions or machines have made the difference."
            )
    for name, values in sections.items():
        rows = list(values.items())
        for key, (one, other) in rows[:_SHOWN]:
            if name == "modules":
                yield f"  code: the module {key} differs"
            else:
                yield f"  {name}: {key} is {cell(one)}, and {cell(other)} in the second run"
        if len(rows) > _SHOWN:
            yield f"  {name}: {len(rows) - _SHOWN} more"
    if difference is not None and not any(sections.values()):
        yield "  Configuration, code and versions are the same."


def _what(difference: Mapping[str, Any]) -> str:
    step = difference["step"]
    if difference["what"] == "logged":
        return f"what was logged at step {step:,}"
    if difference["what"] == "data":
        one, other = difference["samples"]
        if not one and not other:
            return f"the data of step {step:,}: the same samples in another order"
        return f"the data of step {step:,}: {_listed(one)} only in the first run, {_listed(other)} only in the second"
    place = difference["place"]
    layer = place["layer"]
    name = f"`{layer}`" if layer else "the model"
    kind = place["kind"]
    if kind == "batch":
        what = name
    elif place["direction"] == "update":
        what = f"the weight {name} after the update"
    elif kind == "parameter":
        what = f"the gradient of {name}"
    elif kind == "loss":
        what = "the loss"
    else:
        what = f"the {kind} of {name}"
        if place["type"]:
            what += f" ({place['type']})"
    if place["direction"] == "backward" and kind != "parameter":
        what = f"the gradient of {what}"
    text = f"step {step:,}, rank {difference['rank']}: {what}"
    if difference["samples"] is not None:
        text += f", for {_listed(difference['samples'])}"
    return text


def _listed(indices: Sequence[int]) -> str:
    if not indices:
        return "no sample"
    noun = "sample" if len(indices) == 1 else "samples"
    return f"{noun} {format_numbers(indices, max_spans=5)}"
