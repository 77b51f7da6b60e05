"""Where three trainings differ by more than rounding: with one process, with moved weights, and with several.

`answer` runs in a process that has torch, for `job`, which has none. It compares step by step, up to the first step
that differs, and guesses why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from framework.jobs.parity.recording import POWERS, StepTrace, Trace, trace_file

LAYERS, GRADIENTS, WEIGHTS, BUFFERS = "layers", "gradients", "weights", "buffers"
_FACTOR = 4.0  # times what moved weights change is allowed
# Times what its gradient may be off by, a weight may be, too: an optimizer may enlarge small gradients.
_WEIGHTS_PER_GRADIENT = 8.0
_UNSURE = 0.5  # if so much is allowed, the value is nothing but rounding


@dataclass(frozen=True)
class Difference:
    """How far one thing is off: the norm of its difference over its own norm."""

    name: str
    difference: float
    allowed: float
    rounding: float  # the most that the moved weights have changed it so far
    rank: int = 0  # the one with the largest difference; 0 for layers, which are compared over all ranks

    @property
    def is_too_large(self) -> bool:
        return self.difference > self.allowed

    @property
    def is_sure(self) -> bool:
        """True if a mistake could be distinguished from rounding."""
        return self.allowed < _UNSURE


Step = Mapping[str, Sequence[Difference]]  # by part; layers in the order of the forward
Compared = tuple[str, Sequence[Tensor | None]]  # a tensor's name, and what it is in `one`, `moved` and `many`


def answer(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Compare the records of the runs `one`, `moved` and `many`, with `processes`; see `job` for the keys."""
    processes: int = arguments["processes"]
    one, moved = (_load(arguments[side], rank=0) for side in ("one", "moved"))
    many = [_load(arguments["many"], rank=rank) for rank in range(processes)]
    steps: list[Step] = []
    first_difference: dict[str, Any] | None = None
    off = ((name, tensor_difference(tensor, many[0].weights.get(name))) for name, tensor in one.weights.items())
    if changed := [Difference(name, amount, one.floor, 0.0) for name, amount in off if amount > one.floor]:
        guess = Guess("start", names=[each.name for each in changed])
        first_difference = {"step": 0, "layer": None, "parts": {WEIGHTS: _counted(changed)}, **guess._asdict()}
    for single, perturbed, *ranks in zip(one.steps, moved.steps, *(trace.steps for trace in many), strict=False):
        if first_difference:
            break
        step = compare_step(single, perturbed, ranks, floor=one.floor, before=steps)
        steps.append(step)
        first_difference = _first_difference(len(steps), step, single, ranks, floor=one.floor)
    sure = {each.name for step in steps for each in step[GRADIENTS] if each.is_sure}
    return {
        "same": first_difference is None and bool(sure),
        "processes": processes,
        "steps": len(steps),
        "model": one.model,
        "dropouts": one.dropouts,
        "parts": {part: _summary(part, steps) for part in (LAYERS, GRADIENTS, WEIGHTS, BUFFERS)},
        "unsure": [each.name for each in (steps[0][GRADIENTS] if steps else ()) if each.name not in sure],
        "first_difference": first_difference,
    }


def _load(folder: str, *, rank: int) -> Trace:
    """Return what one of our own ranks wrote."""
    trace: Trace = torch.load(trace_file(Path(folder), rank=rank), weights_only=False)
    return trace


def _summary(part: str, steps: Sequence[Step]) -> dict[str, Any]:
    """Return how many are compared, and the one closest to its limit or beyond it most, with its step."""
    every = [(each, number) for number, step in enumerate(steps, start=1) for each in step[part]]
    sure = [(each, number) for each, number in every if each.is_sure] or every
    if not sure:
        return {"compared": 0, "greatest": None}
    worst, number = max(sure, key=lambda pair: pair[0].difference / pair[0].allowed)
    return {"compared": len({each.name for each, _ in every}), "greatest": {**asdict(worst), "step": number}}


def _counted(found: Sequence[Difference]) -> dict[str, Any]:
    return {"number": len(found), "first": asdict(found[0])}


# One step


def compare_step(
    one: StepTrace, moved: StepTrace, many: Sequence[StepTrace], *, floor: float, before: Sequence[Step]
) -> Step:
    """many: of all ranks, in order. before: the earlier steps."""

    def compare(part: str, compared: Sequence[Compared], extra: Mapping[str, float] | None = None) -> list[Difference]:
        rounding = [tensor_difference(single, perturbed) for _, (single, perturbed, *_) in compared]
        usual, earlier = median(rounding or [0.0]), _largest(before, part, "rounding")
        found = []
        for (name, (single, _, *ranks)), now in zip(compared, rounding, strict=True):
            measured = max(now, earlier.get(name, 0.0))
            allowed = floor + _FACTOR * max(measured, usual) + (extra or {}).get(name, 0.0)
            amounts = [tensor_difference(single, other) for other in ranks]
            found.append(Difference(name, max(amounts), allowed, measured, amounts.index(max(amounts))))
        return found

    def named(part: str, ranks: Sequence[StepTrace]) -> list[Compared]:
        sides = [getattr(trace, part) for trace in (one, moved, *ranks)]
        return [(name, [side.get(name) for side in sides]) for name in dict.fromkeys(chain(*sides))]

    step = {LAYERS: compare(LAYERS, _layers(one, moved, many)), GRADIENTS: compare(GRADIENTS, named(GRADIENTS, many))}
    allowed = _largest([*before, step], GRADIENTS, "allowed")
    extra = {name: _WEIGHTS_PER_GRADIENT * amount for name, amount in allowed.items()}
    step[WEIGHTS] = compare(WEIGHTS, named(WEIGHTS, many), extra)
    # If a strategy doesn't share buffers, the first rank's are saved and evaluated.
    step[BUFFERS] = compare(BUFFERS, named(BUFFERS, many[:1]))
    return step


def _largest(steps: Sequence[Step], part: str, field: str) -> dict[str, float]:
    """Return for each name the largest value of a field in these steps."""
    largest: dict[str, float] = {}
    for each in (each for step in steps for each in step[part]):
        largest[each.name] = max(largest.get(each.name, 0.0), getattr(each, field))
    return largest


def _layers(one: StepTrace, moved: StepTrace, many: Sequence[StepTrace]) -> list[Compared]:
    """Return what passes through modules in the order of the forward, as long as all took the same path."""
    ranks = [trace for trace in many if trace.num_samples]  # a rank may have no sample of a short batch
    found: list[Compared] = []
    for first, second, *others in zip(one.events, moved.events, *(trace.events for trace in ranks), strict=False):
        if any((event.kind, event.module) != (first.kind, first.module) for event in (second, *others)):
            break
        together = sum((event.moments for event in others), torch.zeros(()))
        sides = (first.moments, second.moments, together)
        found.append((first.module, [_roots(moments / one.num_samples) for moments in sides]))
    return found


def _roots(moments: Tensor) -> Tensor:
    """Return the moments in the unit of the values."""
    return torch.stack(
        [moments[0], *(moment ** (1 / power) for moment, power in zip(moments[1:], POWERS, strict=True))]
    )


def tensor_difference(one: Tensor | None, other: Tensor | None) -> float:
    """Return the norm of the difference over the larger norm. None is a tensor of zeros."""
    one, other = (torch.zeros(()) if each is None else each for each in (one, other))
    off = float((one - other).norm())
    return off and off / max(float(one.norm()), float(other.norm()))


# Why


class Guess(NamedTuple):
    """What is probably wrong: a key of `report.CAUSES`, and what its text needs."""

    reason: str
    module: str | None = None  # None if it is about none
    factor: float | None = None  # of the gradients
    names: Sequence[str] = ()  # parameters or buffers


def _first_difference(
    number: int, step: Step, one: StepTrace, many: Sequence[StepTrace], *, floor: float
) -> dict[str, Any] | None:
    """Return what differs in a step, and the guess; None if gradients, weights and buffers are the same."""
    differing = {
        part: found for part, every in step.items() if (found := [each for each in every if each.is_too_large])
    }
    parts = {part: found for part, found in differing.items() if part != LAYERS}
    if not parts:
        return None
    layer = None
    if LAYERS in differing:
        place = step[LAYERS].index(differing[LAYERS][0])
        event, before = one.events[place], one.events[place - 1] if place else None
        layer = {
            **asdict(differing[LAYERS][0]),
            **{key: getattr(event, key) for key in ("kind", "type", "inside")},
            "before": before and (before.module or before.type),
            "drew": any(trace.events[place].drew for trace in (one, *many) if trace.num_samples),
        }
    # With many samples in each process, the moments of what a BatchNorm returns hide what its statistics show.
    statistics = {each.name.rpartition(".")[0] for each in parts.get(BUFFERS, ())}
    norms = [event.module for event in one.events if event.type.startswith("BatchNorm") and event.module in statistics]
    if layer is not None:
        guess = _cause_in_layer(layer)
    elif norms:
        guess = Guess("batch_norm", norms[0])
    elif GRADIENTS in parts:
        guess = _cause_of_gradients(step[GRADIENTS], one, many, floor=floor)
    else:
        part, found = next(iter(parts.items()))
        reason = "buffers" if part == BUFFERS else "replicas" if all(each.rank for each in found) else "optimizer"
        guess = Guess(reason, names=[each.name for each in found])
    return {
        "step": number,
        "layer": layer,
        "parts": {part: _counted(found) for part, found in parts.items()},
        "shares": [trace.num_samples for trace in many],
        **guess._asdict(),
    }


def _cause_in_layer(layer: Mapping[str, Any]) -> Guess:
    # What a module is given was made by the one around it; what the model is given, by the task or the dataset.
    module = layer["name"] if layer["kind"] == "output" else layer["inside"]
    if layer["drew"]:
        return Guess("random", module)
    if module is None:
        return Guess("input")
    is_batch_norm = layer["kind"] == "output" and layer["type"].startswith("BatchNorm")
    return Guess("batch_norm" if is_batch_norm else "mixing", module)


def _cause_of_gradients(
    compared: Sequence[Difference], one: StepTrace, many: Sequence[StepTrace], *, floor: float
) -> Guess:
    """Every module returned the same."""
    found = [each for each in compared if each.is_too_large]
    names = [each.name for each in found]
    if all(each.rank > 0 for each in found):
        return Guess("replicas", names=names)
    given = {name for name, gradient in one.gradients.items() if gradient.any()}
    sure = [each for each in compared if each.is_sure and each.name in given]
    if not all(each.is_too_large for each in sure):
        return Guess("backward", names=names)
    factor, rest = common_factor(one.gradients, many[0].gradients)
    return Guess("factor", factor=factor) if rest <= max([floor, *(each.allowed for each in sure)]) else Guess("loss")


def common_factor(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> tuple[float, float]:
    """Return the factor that brings the tensors of `one` closest to those of `other`, and the difference then."""
    names = one.keys() & other.keys()
    ones, others = (torch.cat([side[name] for name in names]) for side in (one, other))
    size = float(ones.square().sum())
    factor = float((ones * others).sum()) / size if size else 0.0
    return factor, tensor_difference(ones * factor, others)
