"""The answer of `job=parity`, as plain values: asked of a process that has torch, by one that has none."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from framework.parity.comparing import (
    GRADIENTS,
    LAYERS,
    PARTS,
    Difference,
    LayerDifference,
    Step,
    compare_step,
    tensor_difference,
)
from framework.parity.reasons import Likely, Reason, likely
from framework.parity.recording import FOLDER
from framework.parity.tolerance import floor, moved_by
from framework.parity.trace import StartTrace, StepTrace, has_step, load_start, load_step


def answer(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What `findings` gives for the plain arguments `one`, `moved`, `many` (run directories) and `processes`."""
    folders = [Path(arguments[side]) / FOLDER for side in ("one", "moved", "many")]
    return findings(*folders, processes=arguments["processes"])


def findings(one: Path, moved: Path, many: Path, *, processes: int) -> dict[str, Any]:
    """Compare the notes in three folders, step by step up to the first that departs.

    Gives plain values. same: whether gradients, weights and buffers are, and there were any. steps: compared; left_out:
    those of them in which a loss scaler skipped the optimizer. model, dropouts, unit, floor, moved_by: as in
    `StartTrace` and `tolerance`. parts: by what is compared, see `_summary`. unsure: parameters whose gradient is
    rounding and nothing else. departure: null, or what is first and why, see `_departure`.
    """
    start, other = load_start(one), load_start(many)
    unit = max(start.unit, other.unit)
    steps: list[Step] = []
    left_out: list[int] = []
    first: tuple[int, LayerDifference] | None = None
    departure = _other_start(start, other, base=floor(unit))
    number = 0
    while departure is None and all(has_step(side, number + 1) for side in (one, moved, many)):
        number += 1
        alone, beside = (load_step(side, rank=0, step=number) for side in (one, moved))
        ranks = [load_step(many, rank=rank, step=number) for rank in range(processes)]
        step = compare_step(alone, beside, ranks, unit=unit, before=steps)
        steps.append(step)
        left_out += [number] if alone.is_left_out else []
        if first is None and step.first_layer is not None:
            first = number, step.first_layer
        if not step.is_same:
            departure = _departure(number, step, alone, ranks, base=floor(unit))
    return {
        "same": departure is None and any(each.is_sure for step in steps for each in step.differences(GRADIENTS)),
        "processes": processes,
        "steps": number,
        "left_out": left_out,
        "model": start.model,
        "dropouts": start.dropouts,
        "unit": unit,
        "floor": floor(unit),
        "moved_by": moved_by(unit),
        "parts": {part: _summary(part, steps) for part in PARTS},
        "unsure": _unsure(steps),
        "layer_alone": None if first is None or departure is not None else {"step": first[0], **_layer(first[1])},
        "departure": departure,
    }


def _other_start(one: StartTrace, many: StartTrace, *, base: float) -> dict[str, Any] | None:
    """A departure before the first step."""
    off = {name: tensor_difference(tensor, many.weights.get(name)) for name, tensor in one.weights.items()}
    departing = {name: amount for name, amount in off.items() if not amount <= base}
    if not departing:
        return None
    parts = {"weights": _counted([Difference(name, amount, base, 0.0) for name, amount in departing.items()])}
    return {"step": 0, "layer": None, "parts": parts, **_reason(Likely(Reason.START, names=tuple(departing)))}


def _departure(number: int, step: Step, one: StepTrace, many: Sequence[StepTrace], *, base: float) -> dict[str, Any]:
    """step, layer: what is first in the forward, null where every module gives the same. parts: by name, how many
    depart, and the first and the worst of them. shares: samples of ranks. reason, module, factor, names: see `Likely`.
    """
    parts = {part: _counted(step.departing(part)) for part in PARTS if part != LAYERS and step.departing(part)}
    return {
        "step": number,
        "layer": None if step.first_layer is None else _layer(step.first_layer),
        "parts": parts,
        "shares": [len(trace.indices) for trace in many],
        **_reason(likely(step, one, many, base=base)),
    }


def _reason(found: Likely) -> dict[str, Any]:
    return {
        "reason": found.reason.value,
        "module": found.module,
        "factor": found.factor,
        "names": list(found.names),
    }


def _layer(found: LayerDifference) -> dict[str, Any]:
    event, before = found.event, found.before
    return {
        "name": event.module,
        "type": event.type,
        "kind": event.kind,
        "inside": event.inside,
        "call": event.call,
        "own": event.own,
        "drew": found.drew,
        "before": None if before is None else {"name": before.module, "type": before.type, "kind": before.kind},
        **_plain(found.difference),
    }


def _summary(part: str, steps: Sequence[Step]) -> dict[str, Any]:
    """How many are compared in a step, the one nearest to departing or beyond it, and in which step; null for none."""
    every = [(each, number) for number, step in enumerate(steps, start=1) for each in step.differences(part)]
    sure = [(each, number) for each, number in every if each.is_sure] or every
    if not sure:
        return {"compared": 0, "greatest": None}
    worst, number = max(sure, key=lambda pair: pair[0].amount / pair[0].allowed)
    compared = {each.name for each, _ in every}
    return {"compared": len(compared), "greatest": {**_plain(worst), "step": number}}


def _counted(departing: Sequence[Difference]) -> dict[str, Any]:
    worst = max(departing, key=lambda each: each.amount)
    return {"number": len(departing), "first": _plain(departing[0]), "worst": _plain(worst)}


def _unsure(steps: Sequence[Step]) -> list[str]:
    """In no step."""
    sure = {each.name for step in steps for each in step.gradients if each.is_sure}
    return [each.name for each in (steps[0].gradients if steps else ()) if each.name not in sure]


def _plain(each: Difference) -> dict[str, Any]:
    """JSON has no infinity: null is a tensor of another size."""
    amount = each.amount if math.isfinite(each.amount) else None
    return {
        "name": each.name,
        "rank": each.rank,
        "difference": amount,
        "allowed": each.allowed,
        "rounding": each.rounding,
    }
