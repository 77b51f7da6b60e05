"""What differs first between two trainings, and what is probably the cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from framework.jobs.parity.differences import BUFFERS, GRADIENTS, LAYERS, WEIGHTS, Difference, Step, tensor_difference
from framework.jobs.parity.recording import StepTrace, Trace


class Guess(NamedTuple):
    """What is probably wrong: a key of `page.CAUSES`, and what its text needs."""

    reason: str
    # None if it is about none.
    module: str | None = None
    # Of the gradients.
    factor: float | None = None
    # Parameters or buffers.
    names: Sequence[str] = ()


def differing_start(one: Trace, many: Trace) -> dict[str, Any] | None:
    """Return the initial weights that differ; None if all are the same."""
    differing = []
    for name, weight in one.weights.items():
        distance = tensor_difference(weight, many.weights.get(name))
        difference = Difference(name, distance, one.floor, 0.0)
        if difference.is_too_large:
            differing.append(difference)
    if not differing:
        return None
    guess = Guess("start", names=[difference.name for difference in differing])
    return {"step": 0, "layer": None, "parts": _counted({WEIGHTS: differing}), "shares": [], **guess._asdict()}


def first_difference(
    number: int, step: Step, one: StepTrace, many: Sequence[StepTrace], *, floor: float
) -> dict[str, Any] | None:
    """Return what differs in a step, and the guess; None if gradients, weights and buffers are the same."""
    too_large = {}
    for part, differences in step.items():
        too_large[part] = [difference for difference in differences if difference.is_too_large]
    layers = too_large.pop(LAYERS)
    if not any(too_large.values()):
        return None
    layer = None
    if layers:
        place = step[LAYERS].index(layers[0])
        layer = _differing_layer(layers[0], place, one, many)
        guess = _cause_in_layer(layer)
    else:
        guess = _cause_elsewhere(step, too_large, one, many, floor=floor)
    return {
        "step": number,
        "layer": layer,
        "parts": _counted(too_large),
        "shares": [trace.num_samples for trace in many],
        **guess._asdict(),
    }


def _differing_layer(difference: Difference, place: int, one: StepTrace, many: Sequence[StepTrace]) -> dict[str, Any]:
    """Return the facts of the first layer that differs. place: that of its event in the forward."""
    event = one.events[place]
    before = None
    if place > 0:
        event_before = one.events[place - 1]
        before = event_before.module or event_before.type
    traces = [trace for trace in (one, *many) if trace.num_samples]
    return {
        **asdict(difference),
        "kind": event.kind,
        "type": event.type,
        "inside": event.inside,
        "before": before,
        "drew": any(trace.events[place].drew for trace in traces),
    }


def _counted(parts: Mapping[str, Sequence[Difference]]) -> dict[str, Any]:
    """Return how many differ in each part, and the first of them."""
    counted = {}
    for part, differences in parts.items():
        if differences:
            counted[part] = {"number": len(differences), "first": asdict(differences[0])}
    return counted


def _cause_in_layer(layer: Mapping[str, Any]) -> Guess:
    """Return the cause if a layer's input or output is the first to differ."""
    module = layer["name"]
    if layer["kind"] == "input":
        # It was made by the module around this one; the model's own input, by the task or the dataset.
        module = layer["inside"]
    if layer["drew"]:
        return Guess("random", module)
    if module is None:
        return Guess("input")
    if layer["kind"] == "output" and layer["type"].startswith("BatchNorm"):
        return Guess("batch_norm", module)
    return Guess("mixing", module)


def _cause_elsewhere(
    step: Step,
    too_large: Mapping[str, Sequence[Difference]],
    one: StepTrace,
    many: Sequence[StepTrace],
    *,
    floor: float,
) -> Guess:
    """Return the cause if every module returned the same. too_large: what differs."""
    # With many samples in each process, the moments of what a BatchNorm returns hide what its statistics show.
    statistics = {buffer.name.rpartition(".")[0] for buffer in too_large[BUFFERS]}
    for event in one.events:
        if event.type.startswith("BatchNorm") and event.module in statistics:
            return Guess("batch_norm", event.module)

    part = next(part for part in (GRADIENTS, WEIGHTS, BUFFERS) if too_large[part])
    names = [difference.name for difference in too_large[part]]
    if part == BUFFERS:
        return Guess("buffers", names=names)
    if all(difference.rank > 0 for difference in too_large[part]):
        return Guess("replicas", names=names)
    if part == WEIGHTS:
        return Guess("optimizer", names=names)

    nonzero = {name for name, gradient in one.gradients.items() if gradient.any()}
    sure = [gradient for gradient in step[GRADIENTS] if gradient.is_sure and gradient.name in nonzero]
    if not sure:
        return Guess("loss")
    if not all(gradient.is_too_large for gradient in sure):
        return Guess("backward", names=names)
    factor, distance = common_factor(one.gradients, many[0].gradients)
    if distance <= max(floor, *(gradient.allowed for gradient in sure)):
        return Guess("factor", factor=factor)
    return Guess("loss")


def common_factor(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> tuple[float, float]:
    """Return the factor that brings the tensors of `one` closest to those of `other`, and the difference then."""
    ones = torch.cat(list(one.values()))
    others = torch.cat([other.get(name, torch.zeros_like(tensor)) for name, tensor in one.items()])
    factor = float(ones.dot(others) / ones.square().sum())
    return factor, tensor_difference(ones * factor, others)
