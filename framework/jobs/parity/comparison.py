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
_FACTOR = 4.0  # times what moved weights change is allowed
# Times what its gradient may be off by, a weight may be, too: an optimizer may enlarge small gradients.
_WEIGHTS_PER_GRADIENT = 8.0
_WIDTH = 110
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
Compared = tuple[str, Sequence[Tensor | None]]  # a tensor's name, and what it is in `one`, `moved` and each of `many`


def compare(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Compare the records of the runs `one`, `moved` and `many`, with `processes`.

    Return the `answer`, whose keys `job` describes, and the `text` to print.
    """
    processes: int = arguments["processes"]
    one, moved = (_load(arguments[side], rank=0) for side in ("one", "moved"))
    many = [_load(arguments["many"], rank=rank) for rank in range(processes)]
    comparison = Comparison(one.floor)
    steps = list[Step]()
    first_difference = _differing_start(one, many[0])
    for single, perturbed, *ranks in zip(one.steps, moved.steps, *(trace.steps for trace in many), strict=False):
        if first_difference is None:
            steps.append(comparison.compare_step(single, perturbed, ranks))
            first_difference = _first_difference(len(steps), steps[-1], single, ranks, floor=one.floor)
    sure = {each.name for step in steps for each in step[GRADIENTS] if each.is_sure}
    found = {
        "same": first_difference is None and bool(sure),
        "processes": processes,
        "steps": len(steps),
        "model": one.model,
        "dropouts": one.dropouts,
        "parts": {part: _summary(part, steps) for part in (LAYERS, GRADIENTS, WEIGHTS, BUFFERS)},
        "unsure": [each.name for each in (steps[0][GRADIENTS] if steps else ()) if each.name not in sure],
        "first_difference": first_difference,
    }
    return {"answer": found, "text": render(found)}


def _load(folder: str, *, rank: int) -> Trace:
    """Return what one of our own ranks wrote."""
    trace: Trace = torch.load(trace_file(Path(folder), rank=rank), weights_only=False)
    return trace


def _summary(part: str, steps: Sequence[Step]) -> dict[str, Any]:
    """Return how many are compared, and the one closest to its limit or beyond it most, with its step."""
    every = [(each, number) for number, step in enumerate(steps, start=1) for each in step[part]]
    if not every:
        return {"compared": 0, "greatest": None}
    worst, number = max(every, key=lambda pair: (pair[0].is_sure, pair[0].difference / pair[0].allowed))
    return {"compared": len({each.name for each, _ in every}), "greatest": {**asdict(worst), "step": number}}


# One step


class Comparison:
    """Compares steps in their order, since rounding that was measured applies from then on."""

    def __init__(self, floor: float) -> None:
        self._floor = floor
        self._rounding = defaultdict[tuple[str, str], float](float)
        self._gradients_allowed = defaultdict[str, float](float)

    def compare_step(self, one: StepTrace, moved: StepTrace, many: Sequence[StepTrace]) -> Step:
        """many: of all ranks, in order."""
        step = {LAYERS: self._compare(LAYERS, list(_layers(one, moved, many)))}
        # If a strategy doesn't share buffers, the first rank's are saved and evaluated.
        for part, ranks in ((GRADIENTS, many), (WEIGHTS, many), (BUFFERS, many[:1])):
            sides = [getattr(trace, part) for trace in (one, moved, *ranks)]
            names = dict.fromkeys(chain(*sides))
            step[part] = self._compare(part, [(name, [side.get(name) for side in sides]) for name in names])
        return step

    def _compare(self, part: str, compared: Sequence[Compared]) -> list[Difference]:
        rounding = [tensor_difference(single, perturbed) for _, (single, perturbed, *_) in compared]
        usual = median(rounding or [0.0])
        found = []
        for (name, (single, _, *ranks)), now in zip(compared, rounding, strict=True):
            measured = self._rounding[part, name] = max(now, self._rounding[part, name])
            allowed = self._floor + _FACTOR * max(measured, usual)
            if part == GRADIENTS:
                self._gradients_allowed[name] = max(allowed, self._gradients_allowed[name])
            elif part == WEIGHTS:
                allowed += _WEIGHTS_PER_GRADIENT * self._gradients_allowed[name]
            amounts = [tensor_difference(single, other) for other in ranks]
            found.append(Difference(name, max(amounts), allowed, measured, amounts.index(max(amounts))))
        return found


def _layers(one: StepTrace, moved: StepTrace, many: Sequence[StepTrace]) -> Iterator[Compared]:
    """Yield what passes through modules in the order of the forward, as long as all took the same path."""
    ranks = [trace for trace in many if trace.num_samples]  # a rank may have no sample of a short batch
    # The p-th root of a p-th moment has the unit of the values.
    exponents = torch.tensor([1.0, *(1 / power for power in POWERS)])
    for first, second, *others in zip(one.events, moved.events, *(trace.events for trace in ranks), strict=False):
        if any(event.place != first.place for event in (second, *others)):
            return
        together = torch.stack([event.moments for event in others]).sum(dim=0)
        moments = (first.moments, second.moments, together)
        yield first.module, [(each / one.num_samples) ** exponents for each in moments]


def tensor_difference(one: Tensor | None, other: Tensor | None) -> float:
    """Return the norm of the difference over the larger norm. None is a tensor of zeros."""
    one, other = (torch.zeros(()) if each is None else each for each in (one, other))
    off = float((one - other).norm())
    return off and off / max(float(one.norm()), float(other.norm()))


# Why


class Guess(NamedTuple):
    """What is probably wrong: a key of `CAUSES`, and what its text needs."""

    reason: str
    module: str | None = None  # None if it is about none
    factor: float | None = None  # of the gradients
    names: Sequence[str] = ()  # parameters or buffers


def _differing_start(one: Trace, many: Trace) -> dict[str, Any] | None:
    """Return the initial weights that differ; None if all are the same."""
    every = [
        Difference(name, tensor_difference(each, many.weights.get(name)), one.floor, 0.0)
        for name, each in one.weights.items()
    ]
    found = [each for each in every if each.is_too_large]
    if not found:
        return None
    guess = Guess("start", names=[each.name for each in found])
    return {"step": 0, "layer": None, "parts": _counted({WEIGHTS: found}), "shares": [], **guess._asdict()}


def _first_difference(
    number: int, step: Step, one: StepTrace, many: Sequence[StepTrace], *, floor: float
) -> dict[str, Any] | None:
    """Return what differs in a step, and the guess; None if gradients, weights and buffers are the same."""
    found = {part: [each for each in every if each.is_too_large] for part, every in step.items()}
    layers = found.pop(LAYERS)
    if not any(found.values()):
        return None
    layer = None
    if layers:
        place = step[LAYERS].index(layers[0])
        event = one.events[place]
        before = one.events[place - 1] if place else None
        layer = {
            **asdict(layers[0]),
            **{key: getattr(event, key) for key in ("kind", "type", "inside")},
            "before": before and (before.module or before.type),
            "drew": any(trace.events[place].drew for trace in (one, *many) if trace.num_samples),
        }
    return {
        "step": number,
        "layer": layer,
        "parts": _counted(found),
        "shares": [trace.num_samples for trace in many],
        **(_cause_in_layer(layer) if layer else _cause_elsewhere(step, found, one, many, floor=floor))._asdict(),
    }


def _counted(parts: Mapping[str, Sequence[Difference]]) -> dict[str, Any]:
    return {part: {"number": len(found), "first": asdict(found[0])} for part, found in parts.items() if found}


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
    step: Step, found: Mapping[str, Sequence[Difference]], one: StepTrace, many: Sequence[StepTrace], *, floor: float
) -> Guess:
    """Return the cause if every module returned the same. found: what differs."""
    # With many samples in each process, the moments of what a BatchNorm returns hide what its statistics show.
    statistics = {each.name.rpartition(".")[0] for each in found[BUFFERS]}
    for event in one.events:
        if event.type.startswith("BatchNorm") and event.module in statistics:
            return Guess("batch_norm", event.module)
    part = next(part for part in (GRADIENTS, WEIGHTS, BUFFERS) if found[part])
    names = [each.name for each in found[part]]
    if part == BUFFERS:
        return Guess("buffers", names=names)
    if all(each.rank > 0 for each in found[part]):
        return Guess("replicas", names=names)
    if part == WEIGHTS:
        return Guess("optimizer", names=names)
    given = {name for name, gradient in one.gradients.items() if gradient.any()}
    sure = [each for each in step[GRADIENTS] if each.is_sure and each.name in given]
    if not sure:
        return Guess("loss")
    if not all(each.is_too_large for each in sure):
        return Guess("backward", names=names)
    factor, rest = common_factor(one.gradients, many[0].gradients)
    return Guess("factor", factor=factor) if rest <= max([floor, *(each.allowed for each in sure)]) else Guess("loss")


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
    lines += [""] if lines[-1] else []
    if answer["first_difference"] is not None:
        return "\n".join([*lines, *_difference(answer, answer["first_difference"])])
    worst = answer["parts"]["weights"]["greatest"]
    if not answer["same"]:
        verdict = (
            "Nothing can be compared: rounding is as large as the gradients, or no step was made (a loss scaler skips\n"
            "the first ones). Compare in trainer.precision=32-true, or in 64-true on the CPU."
        )
    else:
        what = "weights" if worst["allowed"] < _UNSURE else "gradients (rounding is as large as the weights' changes)"
        verdict = (
            f"The same: {answer['model']} gets the same {what} from 1 process and from {answer['processes']} in "
            f"{format_count(answer['steps'], 'step')}, but for rounding."
        )
    return "\n".join([*lines, verdict])


def _table(answer: Mapping[str, Any]) -> str:
    rows: list[tuple[str, ...]] = [("", "compared", "off by", "allowed", "rounding", "where")]
    for part, found in answer["parts"].items():
        row: tuple[str, ...] = (part, str(found["compared"]))
        if (worst := found["greatest"]) is not None:
            off, allowed, rounding = (_number(worst[key]) for key in ("difference", "allowed", "rounding"))
            row += (off, allowed, rounding, f"{worst['name'] or answer['model']}, step {worst['step']}")
        rows.append(row)
    return format_table(rows)


def _difference(answer: Mapping[str, Any], first_difference: Mapping[str, Any]) -> Iterator[str]:
    step = first_difference["step"]
    layer = first_difference["layer"]
    yield f"Not the same: {answer['model']} differs {f'in step {step}' if step else 'before the first step'}."
    rows = [] if layer is None else [("first", _layer(layer))]
    for part, found in first_difference["parts"].items():
        of = f" of {answer['parts'][part]['compared']}" if step else ""
        rows.append((part, f"{found['number']}{of} differ; first {found['first']['name']}, {_off(found['first'])}"))
    yield format_table(rows)
    shares = first_difference["shares"]
    text = CAUSES[first_difference["reason"]].format(
        # Random numbers that no module draws are drawn by the task.
        module="The task" if first_difference["module"] is None else first_difference["module"] or answer["model"],
        names=_shortened(first_difference["names"]),
        factor=first_difference["factor"],
        shares=" or ".join(map(str, sorted(set(shares)))),
        total=sum(shares),
    )
    yield "\nProbably:"
    yield textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


def _layer(layer: Mapping[str, Any]) -> str:
    """Return where in the forward a layer differs, and by how much."""
    where = f"the {layer['kind']} of " + (f"{layer['name']} ({layer['type']})" if layer["name"] else layer["type"])
    if layer["kind"] == "input" and layer["inside"] is not None:
        where += f", made in the forward of {layer['inside'] or 'the model'}"
        where += f" after {layer['before']}" if layer["before"] else ""
    return f"{where}: {_off(layer)}"


def _off(found: Mapping[str, Any]) -> str:
    where = f" on rank {found['rank']}" if found["rank"] else ""
    return f"{_number(found['difference'])} off{where} ({_number(found['allowed'])} allowed)"


def _number(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:.1e}" if value < 0.01 else f"{value:.2g}"


def _shortened(names: Sequence[str]) -> str:
    return textwrap.shorten(", ".join(names), _WIDTH, placeholder=" …")
