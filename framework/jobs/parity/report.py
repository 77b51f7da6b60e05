"""Print the result of `job=parity`: a table, the verdict, the probable cause. No torch."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from framework.system.formatting import format_count, format_table

_MAX_NAMES = 3
_WIDTH = 110
_UNSURE = 0.5  # if so much is allowed, the value is nothing but rounding
_SHARPER = "Compare in trainer.precision=32-true, or in 64-true on the CPU."

CAUSES: Mapping[str, str] = {
    "start": "The models start differently: {names} isn't the same in two trainings with one seed. Something in making "
    "the model draws numbers that don't depend on `seed` (an unseeded generator, the time) or on the rank.",
    "input": "The model's input isn't the same for the same sample. Either the dataset returns something else each "
    "time (only the generators of Python, NumPy and torch are seeded for each sample), or the task computes it "
    "from all samples of its process.",
    "random": "{module} draws random numbers, other ones in each process. If they are meant (noise, augmentation, "
    "negative samples, torch.nn.functional.dropout, which can't be switched off here), nothing is wrong; set them to 0 "
    "to compare the rest. Random numbers drawn in the dataset are the same on any number of processes.",
    "batch_norm": "In training, {module} takes mean and variance over the samples of its own process, {shares} of "
    "{total}. With several processes that is a different model. If the shares are large, accept it. Else share the "
    "statistics over processes, on GPUs: strategy=ddp strategy.sync_batchnorm=true. Or normalise each sample by "
    "itself: torch.nn.GroupNorm, torch.nn.LayerNorm, or a BatchNorm in eval mode if the model is only fine-tuned.",
    "mixing": "The output of {module} for a sample depends on the other samples of its process: a mean, norm or rank "
    "over the batch (torch.nn.functional.batch_norm), pairs of samples, padding to the longest. Gather the samples of "
    "all processes for it (torch.distributed.nn.functional.all_gather keeps gradients), or accept it. If it looks at "
    "one sample only, it draws from a random generator of its own, or depends on the rank.",
    "factor": "Every layer is the same, and all gradients are {factor} times those of one process; they reach the "
    "optimizer as the mean over processes. The loss (StepOutput.loss) should be the mean over the samples of its batch "
    "(reduction='mean'). With 1 over the number of processes, it is a sum; else it is divided by something else, or "
    "gradients are scaled.",
    "loss": "Every layer is the same, and gradients aren't. The loss isn't a mean over the samples of its batch: it "
    "is divided by a fixed batch size, class weights and ignore_index divide by weights and tokens of each process, "
    "contrastive losses see only its samples, or it draws random numbers. Use a mean over samples, gather what the "
    "loss needs over processes, or accept it.",
    "backward": "Every layer and the gradients of other parameters are the same; {names} isn't: a parameter that only "
    "some samples use, or that is used outside of the model's forward, a hook or an autograd.Function that depends on "
    "the batch, or a second loss on part of the model that isn't a mean over samples.",
    "replicas": "The processes don't keep the same model: only the first has the weights and gradients of one process "
    "({names}). The strategy doesn't average gradients, or the optimizer draws random numbers or depends on the rank.",
    "optimizer": "All gradients are the same, and what the optimizer makes of them isn't: {names}. It depends on the "
    "number of processes (a learning rate that is scaled by it), or draws random numbers.",
    "buffers": "Gradients and weights are the same; {names} isn't. It is computed in the forward from the samples of a "
    "process, and the first process's is saved. Reduce it over processes there, if it matters.",
}


def render(answer: Mapping[str, Any]) -> str:
    """Return the table and the verdict."""
    notes = list(_notes(answer))
    lines = ["", _table(answer), "", *notes, *([""] if notes else [])]
    if answer["first_difference"] is not None:
        lines += _difference(answer, answer["first_difference"])
    elif answer["same"]:
        lines += _same(answer)
    else:
        lines += [
            "Nothing can be compared: rounding is as large as the gradients, or no step was made (a loss scaler skips",
            f"the first ones). {_SHARPER}",
        ]
    return "\n".join(lines)


def _table(answer: Mapping[str, Any]) -> str:
    rows = [("", "compared", "off by", "allowed", "rounding", "where")]
    for part, found in answer["parts"].items():
        worst = found["greatest"]
        if worst is None:
            rows.append((part, "0", "", "", "", ""))
        else:
            off, allowed, rounding = (_number(worst[key]) for key in ("difference", "allowed", "rounding"))
            where = f"{worst['name'] or answer['model']}, step {worst['step']}"
            rows.append((part, str(found["compared"]), off, allowed, rounding, where))
    return format_table(rows)


def _notes(answer: Mapping[str, Any]) -> Iterator[str]:
    if answer["dropouts"]:
        yield f"Dropout was switched off in {format_count(answer['dropouts'], 'module')}."
    if answer["unsure"]:
        number = format_count(len(answer["unsure"]), "parameter")
        yield f"{number} can't be compared, since rounding is as large as the gradient: {_listed(answer['unsure'])}"


def _same(answer: Mapping[str, Any]) -> Iterator[str]:
    worst, steps = answer["parts"]["weights"]["greatest"], format_count(answer["steps"], "step")
    is_sure = worst is not None and worst["allowed"] < _UNSURE
    what = "weights" if is_sure else "gradients"
    yield (
        f"The same: {answer['model']} gets the same {what} from 1 process and from {answer['processes']} in {steps}, "
        "but for rounding."
    )
    if not is_sure:
        yield f"The weights can't be compared: rounding is as large as their changes. {_SHARPER}"


def _difference(answer: Mapping[str, Any], first_difference: Mapping[str, Any]) -> Iterator[str]:
    step, layer = first_difference["step"], first_difference["layer"]
    yield f"Not the same: {answer['model']} differs {f'in step {step}' if step else 'before the first step'}."
    rows = [] if layer is None else [("first", _layer(layer))]
    for part, found in first_difference["parts"].items():
        of = f" of {answer['parts'][part]['compared']}" if step else ""
        rows.append((part, f"{found['number']}{of} differ; first {found['first']['name']}, {_off(found['first'])}"))
    yield format_table(rows)
    # Random numbers that no module draws are drawn by the task.
    name = "The task" if first_difference["module"] is None else first_difference["module"] or answer["model"]
    if layer is not None and name == layer["name"]:
        name = f"{name} ({layer['type']})"
    shares, factor = first_difference.get("shares", []), first_difference["factor"]
    text = CAUSES[first_difference["reason"]].format(
        module=name,
        names=_listed(first_difference["names"]),
        factor="" if factor is None else f"{factor:.4g}",
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
    return "0" if value == 0 else f"{value:.1e}" if value < 0.01 else f"{value:.2g}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more
