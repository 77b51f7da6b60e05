"""What is printed of the answer of job=parity: a table, what differs first, and what to do about it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from framework.jobs.parity.differences import UNSURE
from framework.system.formatting import format_count, format_table

_WIDTH = 110

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
    what = "weights"
    if answer["parts"]["weights"]["greatest"]["allowed"] >= UNSURE:
        what = "gradients (rounding is as large as the weights' changes)"
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
            row += (
                _number(worst["difference"]),
                _number(worst["allowed"]),
                _number(worst["rounding"]),
                f"{worst['name'] or answer['model']}, step {worst['step']}",
            )
        rows.append(row)
    return format_table(rows)


def _difference(answer: Mapping[str, Any], first_difference: Mapping[str, Any]) -> Iterator[str]:
    """Yield what differs first, and the guess why."""
    step = first_difference["step"]
    when = "before the first step"
    if step > 0:
        when = f"in step {step}"
    yield f"Not the same: {answer['model']} differs {when}."

    rows = []
    if first_difference["layer"] is not None:
        rows.append(("first", _layer(first_difference["layer"])))
    for part, differing in first_difference["parts"].items():
        number = str(differing["number"])
        if step > 0:
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
    name = layer["type"]
    if layer["name"]:
        name = f"{layer['name']} ({name})"
    where = f"the {layer['kind']} of {name}"
    if layer["kind"] == "input" and layer["inside"] is not None:
        where += f", made in the forward of {layer['inside'] or 'the model'}"
        if layer["before"]:
            where += f" after {layer['before']}"
    return f"{where}: {_off(layer)}"


def _off(difference: Mapping[str, Any]) -> str:
    """Return by how much something is off."""
    off = f"{_number(difference['difference'])} off"
    if difference["rank"] > 0:
        off += f" on rank {difference['rank']}"
    return f"{off} ({_number(difference['allowed'])} allowed)"


def _number(value: float) -> str:
    if value == 0:
        return "0"
    if value < 0.01:
        return f"{value:.1e}"
    return f"{value:.2g}"


def _shortened(names: Sequence[str]) -> str:
    return textwrap.shorten(", ".join(names), _WIDTH, placeholder=" …")
