"""Where three trainings differ by more than rounding: with one process, with moved weights, and with several.

`compare` runs in a process that has torch, for `job`, which has none. It compares step by step, up to the first step
that differs, guesses why, and says so.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from framework.jobs.parity.recording import POWERS, StepTrace, Trace, trace_file
from framework.system.formatting import format_count, format_table

LAYERS = "layers"
GRADIENTS = "gradients"
WEIGHTS = "weights"
BUFFERS = "buffers"
# Times what moved weights change is allowed.
_FACTOR = 4.0
# Times what its gradient may be off by, a weight may be, too: an optimizer may enlarge small gradients.
_WEIGHTS_PER_GRADIENT = 8.0
_WIDTH = 110
# If so much is allowed, the value is nothing but rounding.
_UNSURE = 0.5


@dataclass(frozen=True)
class Difference:
    """How far one thing is off: the norm of its difference over its own norm."""

    name: str
    difference: float
    allowed: float
    # The most that the moved weights have changed it so far.
    rounding: float
    # The one with the largest difference; 0 for layers, which are compared over all ranks.
    rank: int = 0

    @property
    def is_too_large(self) -> bool:
        return self.difference > self.allowed

    @property
    def is_sure(self) -> bool:
        """True if a mistake could be distinguished from rounding."""
        return self.allowed < _UNSURE


Step = Mapping[str, Sequence[Difference]]
"""The differences of a step by part; layers in the order of the forward."""


class Compared(NamedTuple):
    """A tensor in all trainings; None where there is none."""

    name: str
    one: Tensor | None
    moved: Tensor | None
    # One for each rank of the training on several processes.
    many: Sequence[Tensor | None]


def compare(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Compare the records of the runs `one`, `moved` and `many`, with `processes`.

    Return the `answer`, whose keys `job` describes, and the `text` to print.
    """
    processes: int = arguments["processes"]
    one, moved = (_load(arguments[side], rank=0) for side in ("one", "moved"))
    many = [_load(arguments["many"], rank=rank) for rank in range(processes)]
    comparison = Comparison(one.floor)
    steps: list[Step] = []
    first_difference = _differing_start(one, many[0])
    for single, perturbed, *ranks in zip(one.steps, moved.steps, *(trace.steps for trace in many), strict=False):
        if first_difference is None:
            steps.append(comparison.compare_step(single, perturbed, ranks))
            first_difference = _first_difference(len(steps), steps[-1], single, ranks, floor=one.floor)
    sure = set()
    for step in steps:
        sure |= {gradient.name for gradient in step[GRADIENTS] if gradient.is_sure}
    first_gradients = steps[0][GRADIENTS] if steps else []
    answer = {
        "same": first_difference is None and bool(sure),
        "processes": processes,
        "steps": len(steps),
        "model": one.model,
        "dropouts": one.dropouts,
        "parts": {part: _summary(part, steps) for part in (LAYERS, GRADIENTS, WEIGHTS, BUFFERS)},
        "unsure": [gradient.name for gradient in first_gradients if gradient.name not in sure],
        "first_difference": first_difference,
    }
    return {"answer": answer, "text": render(answer)}


def _load(folder: str, *, rank: int) -> Trace:
    """Return what one of our own ranks wrote."""
    trace: Trace = torch.load(trace_file(Path(folder), rank=rank), weights_only=False)
    return trace


def _summary(part: str, steps: Sequence[Step]) -> dict[str, Any]:
    """Return how many are compared, and the one closest to its limit or beyond it most, with its step."""
    names = set()
    worst: Difference | None = None
    worst_step = 0
    for number, step in enumerate(steps, start=1):
        for difference in step[part]:
            names.add(difference.name)
            if worst is None or _excess(difference) > _excess(worst):
                worst = difference
                worst_step = number
    if worst is None:
        return {"compared": 0, "greatest": None}
    return {"compared": len(names), "greatest": {**asdict(worst), "step": worst_step}}


def _excess(difference: Difference) -> tuple[bool, float]:
    """Return what orders differences: those that can be distinguished from rounding are larger."""
    return difference.is_sure, difference.difference / difference.allowed


# One step


class Comparison:
    """Compares steps in their order, since rounding that was measured applies from then on."""

    def __init__(self, floor: float) -> None:
        self._floor = floor
        self._rounding = defaultdict[tuple[str, str], float](float)
        self._gradients_allowed = defaultdict[str, float](float)

    def compare_step(self, one: StepTrace, moved: StepTrace, many: Sequence[StepTrace]) -> Step:
        """Return the differences of a step. many: of all ranks, in order."""
        # If a strategy doesn't share buffers, the first rank's are saved and evaluated.
        first_of_many = many[:1]
        return {
            LAYERS: self._compare(LAYERS, list(_layers(one, moved, many))),
            GRADIENTS: self._compare(GRADIENTS, _tensors(GRADIENTS, one, moved, many)),
            WEIGHTS: self._compare(WEIGHTS, _tensors(WEIGHTS, one, moved, many)),
            BUFFERS: self._compare(BUFFERS, _tensors(BUFFERS, one, moved, first_of_many)),
        }

    def _compare(self, part: str, compared: Sequence[Compared]) -> list[Difference]:
        rounding = [tensor_difference(tensor.one, tensor.moved) for tensor in compared]
        usual = median(rounding or [0.0])
        differences = []
        for tensor, now in zip(compared, rounding, strict=True):
            name = tensor.name
            measured = max(now, self._rounding[part, name])
            self._rounding[part, name] = measured
            allowed = self._floor + _FACTOR * max(measured, usual)
            if part == GRADIENTS:
                self._gradients_allowed[name] = max(allowed, self._gradients_allowed[name])
            elif part == WEIGHTS:
                allowed += _WEIGHTS_PER_GRADIENT * self._gradients_allowed[name]

            amounts = [tensor_difference(tensor.one, other) for other in tensor.many]
            largest = max(amounts)
            differences.append(Difference(name, largest, allowed, measured, rank=amounts.index(largest)))
        return differences


def _tensors(part: str, one: StepTrace, moved: StepTrace, many: Sequence[StepTrace]) -> list[Compared]:
    """Return the tensors of a part, which is an attribute of a StepTrace."""
    first: Mapping[str, Tensor] = getattr(one, part)
    second: Mapping[str, Tensor] = getattr(moved, part)
    ranks: list[Mapping[str, Tensor]] = [getattr(trace, part) for trace in many]
    names = dict.fromkeys(chain(first, second, *ranks))
    return [Compared(name, first.get(name), second.get(name), [rank.get(name) for rank in ranks]) for name in names]


def _layers(one: StepTrace, moved: StepTrace, many: Sequence[StepTrace]) -> Iterator[Compared]:
    """Yield what passes through modules in the order of the forward, as long as all took the same path."""
    # A rank may have no sample of a short batch.
    ranks = [trace for trace in many if trace.num_samples]
    # The p-th root of a p-th moment has the unit of the values.
    exponents = torch.tensor([1.0, *(1 / power for power in POWERS)])
    for first, second, *others in zip(one.events, moved.events, *(trace.events for trace in ranks), strict=False):
        if any(event.place != first.place for event in (second, *others)):
            return
        together = torch.stack([event.moments for event in others]).sum(dim=0)
        yield Compared(
            first.module,
            (first.moments / one.num_samples) ** exponents,
            (second.moments / one.num_samples) ** exponents,
            [(together / one.num_samples) ** exponents],
        )


def tensor_difference(one: Tensor | None, other: Tensor | None) -> float:
    """Return the norm of the difference over the larger norm. None is a tensor of zeros."""
    if one is None:
        one = torch.zeros(())
    if other is None:
        other = torch.zeros(())
    distance = float((one - other).norm())
    if distance == 0:
        return 0.0
    return distance / max(float(one.norm()), float(other.norm()))


# Why


class Guess(NamedTuple):
    """What is probably wrong: a key of `CAUSES`, and what its text needs."""

    reason: str
    # None if it is about none.
    module: str | None = None
    # Of the gradients.
    factor: float | None = None
    # Parameters or buffers.
    names: Sequence[str] = ()


def _differing_start(one: Trace, many: Trace) -> dict[str, Any] | None:
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


def _first_difference(
    number: int, step: Step, one: StepTrace, many: Sequence[StepTrace], *, floor: float
) -> dict[str, Any] | None:
    """Return what differs in a step, and the guess; None if gradients, weights and buffers are the same."""
    too_large = {part: [each for each in differences if each.is_too_large] for part, differences in step.items()}
    layers = too_large.pop(LAYERS)
    if not any(too_large.values()):
        return None
    if layers:
        place = step[LAYERS].index(layers[0])
        layer = _differing_layer(layers[0], place, one, many)
        guess = _cause_in_layer(layer)
    else:
        layer = None
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
    # What a module is given was made by the one around it; what the model is given, by the task or the dataset.
    module = layer["name"] if layer["kind"] == "output" else layer["inside"]
    if layer["drew"]:
        return Guess("random", module)
    if module is None:
        return Guess("input")
    is_batch_norm = layer["kind"] == "output" and layer["type"].startswith("BatchNorm")
    return Guess("batch_norm" if is_batch_norm else "mixing", module)


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
    is_factor = distance <= max([floor, *(gradient.allowed for gradient in sure)])
    return Guess("factor", factor=factor) if is_factor else Guess("loss")


def common_factor(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> tuple[float, float]:
    """Return the factor that brings the tensors of `one` closest to those of `other`, and the difference then."""
    ones = torch.cat(list(one.values()))
    others = torch.cat([other.get(name, torch.zeros_like(tensor)) for name, tensor in one.items()])
    factor = float(ones.dot(others) / ones.square().sum())
    return factor, tensor_difference(ones * factor, others)


# What is printed

CAUSES: Mapping[str, str] = {
    "start": "{names} isn't the same in two trainings with one seed. Making the model draws numbers that don't depend "
    "on `seed` (an unseeded generator, the time), or that depend on the rank.",
    "input": "The model's input isn't the same for the same sample. The dataset returns something else each time (only "
    "the generators of Python, NumPy and torch are seeded), or the task computes it from all samples of its process.",
    "random": "{module} draws random numbers, other ones in each process. If they are meant (noise, augmentation, "
    "torch.nn.functional.dropout), nothing is wrong; set them to 0 to compare the rest.",
    "batch_norm": "In training, {module} takes mean and variance over the samples of its own process, {shares} of "
    "{total}. If these are many, accept it. Else share the statistics over processes, on GPUs: strategy=ddp "
    "strategy.sync_batchnorm=true. Or use torch.nn.GroupNorm or torch.nn.LayerNorm.",
    "mixing": "The output of {module} for a sample depends on the other samples of its process: a mean, norm or rank "
    "over the batch, pairs of samples, padding to the longest. Gather the samples of all processes for it "
    "(torch.distributed.nn.functional.all_gather keeps gradients), or accept it.",
    "factor": "All gradients are {factor:.4g} times those of one process; they reach the optimizer as the mean over "
    "processes. The loss (StepOutput.loss) should be the mean over the samples of its batch (reduction='mean').",
    "loss": "Every layer is the same, and gradients aren't. The loss isn't a mean over the samples of its batch (but "
    "over tokens that count, sample weights, pairs of samples), or it draws random numbers. Return what it is the mean "
    "over as StepOutput.weight, gather what the loss needs over processes, or accept it.",
    "backward": "Every layer and the gradients of other parameters are the same; {names} isn't: only some samples use "
    "it, or it is used outside of the model's forward, has a hook or an autograd.Function that depends on the batch, "
    "or a second loss that isn't a mean over samples.",
    "replicas": "Only the first process has the weights and gradients of one process ({names}). The strategy doesn't "
    "average gradients, or the optimizer draws random numbers or depends on the rank.",
    "optimizer": "All gradients are the same, and what the optimizer makes of them isn't: {names}. It depends on the "
    "number of processes (a learning rate that is scaled by it), or draws random numbers.",
    "buffers": "Gradients and weights are the same; {names} isn't. It is computed from the samples of a process, and "
    "the first process's is saved. Reduce it over processes, if it matters.",
}


def render(answer: Mapping[str, Any]) -> str:
    """Return the table and the verdict."""
    lines = ["", _table(answer), ""]
    if answer["dropouts"]:
        lines.append(f"Dropout was switched off in {format_count(answer['dropouts'], 'module')}.")
    if answer["unsure"]:
        number = format_count(len(answer["unsure"]), "parameter")
        names = _shortened(answer["unsure"])
        lines.append(f"{number} can't be compared, since rounding is as large as the gradient: {names}")
    if lines[-1]:
        lines.append("")
    if answer["first_difference"] is not None:
        lines += _difference(answer, answer["first_difference"])
    elif answer["same"]:
        lines.append(_sameness(answer))
    else:
        lines.append(
            "Nothing can be compared: rounding is as large as the gradients, or no step was made (a loss scaler skips\n"
            "the first ones). Compare in trainer.precision=32-true, or in 64-true on the CPU."
        )
    return "\n".join(lines)


def _sameness(answer: Mapping[str, Any]) -> str:
    are_weights_sure = answer["parts"]["weights"]["greatest"]["allowed"] < _UNSURE
    what = "weights" if are_weights_sure else "gradients (rounding is as large as the weights' changes)"
    return (
        f"The same: {answer['model']} gets the same {what} from 1 process and from {answer['processes']} in "
        f"{format_count(answer['steps'], 'step')}, but for rounding."
    )


def _table(answer: Mapping[str, Any]) -> str:
    rows: list[tuple[str, ...]] = [("", "compared", "off by", "allowed", "rounding", "where")]
    for part, summary in answer["parts"].items():
        row: tuple[str, ...] = (part, str(summary["compared"]))
        worst = summary["greatest"]
        if worst is not None:
            numbers = [_number(worst[key]) for key in ("difference", "allowed", "rounding")]
            row += (*numbers, f"{worst['name'] or answer['model']}, step {worst['step']}")
        rows.append(row)
    return format_table(rows)


def _difference(answer: Mapping[str, Any], first_difference: Mapping[str, Any]) -> Iterator[str]:
    """Yield what differs first, and the guess why."""
    step = first_difference["step"]
    when = f"in step {step}" if step else "before the first step"
    yield f"Not the same: {answer['model']} differs {when}."

    rows = []
    if first_difference["layer"] is not None:
        rows.append(("first", _layer(first_difference["layer"])))
    for part, differing in first_difference["parts"].items():
        number = str(differing["number"])
        if step:
            number += f" of {answer['parts'][part]['compared']}"
        first = differing["first"]
        rows.append((part, f"{number} differ; first {first['name']}, {_off(first)}"))
    yield format_table(rows)

    module = first_difference["module"]
    if module is None:
        # Random numbers that no module draws are drawn by the task.
        module = "The task"
    shares = first_difference["shares"]
    cause = CAUSES[first_difference["reason"]].format(
        module=module or answer["model"],
        names=_shortened(first_difference["names"]),
        factor=first_difference["factor"],
        shares=" or ".join(map(str, sorted(set(shares)))),
        total=sum(shares),
    )
    yield "\nProbably:"
    yield textwrap.fill(cause, _WIDTH, break_long_words=False, break_on_hyphens=False)


def _layer(layer: Mapping[str, Any]) -> str:
    """Return where in the forward a layer differs, and by how much."""
    name = f"{layer['name']} ({layer['type']})" if layer["name"] else layer["type"]
    where = f"the {layer['kind']} of {name}"
    if layer["kind"] == "input" and layer["inside"] is not None:
        where += f", made in the forward of {layer['inside'] or 'the model'}"
        if layer["before"]:
            where += f" after {layer['before']}"
    return f"{where}: {_off(layer)}"


def _off(difference: Mapping[str, Any]) -> str:
    where = f" on rank {difference['rank']}" if difference["rank"] else ""
    return f"{_number(difference['difference'])} off{where} ({_number(difference['allowed'])} allowed)"


def _number(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:.1e}" if value < 0.01 else f"{value:.2g}"


def _shortened(names: Sequence[str]) -> str:
    return textwrap.shorten(", ".join(names), _WIDTH, placeholder=" …")
