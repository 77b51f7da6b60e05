"""What `job=parity` says, from the object that it writes: a table, a verdict, and the likely reason with what to do."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from framework.config.schema import Config

_SHOWN = 3  # names of parameters
_WIDTH = 110
_NOTABLE = 1.5  # times the first: then the greatest difference is shown too

_SHARPER = "Compare in trainer.precision=32-true, or in 64-true on the CPU."
_UNSURE = 0.5  # where so much is allowed, nothing can be said

_REASONS = {
    "start": """
The models don't begin alike: {names} isn't the same in two trainings with one seed. Something in making the model draws
numbers that `seed` doesn't decide (a generator of its own without a seed, the time), or asks which process it is.
""",
    "input_random": """
The task draws random numbers before it calls the model: each process draws its own. Where that is meant (noise,
augmentation), nothing is wrong; to have the same numbers on any number of processes, draw them in the data set, whose
generators are seeded for each sample.
""",
    "input": """
What goes into the model isn't the same for the same sample. Either data.datasets gives something else each time
(numbers from a generator of its own; the generators of Python, NumPy and torch are seeded for each sample), or the task
makes it from all samples of the batch, of which each process has its own.
""",
    "random": """
{module} draws random numbers in its forward, and each process draws its own. Where that is meant (noise, dropout
through torch.nn.functional, which can't be switched off from outside), nothing is wrong: training is as random on one
process. Set it to 0 to compare all else.
""",
    "batch_norm": """
In training, {module} takes mean and variance over the samples of its own process, {shares} of {total}. With several
processes that is a different model. If the shares are large, accept it. Else share the statistics over processes, on
GPUs: strategy=ddp strategy.sync_batchnorm=true. Or normalise each sample by itself: torch.nn.GroupNorm,
torch.nn.LayerNorm, or a BatchNorm in eval mode where the model is only fine-tuned.
""",
    "pairs": """
What {module} gives for a sample has another size: it depends on how many samples come together in a process (pairs of
samples, padding to the longest). A process sees only its own. Gather the samples of all processes for it
(torch.distributed.nn.functional.all_gather keeps gradients), or accept it.
""",
    "mixing": """
{module} gives a sample something else among other samples, and drew no random numbers from a common generator. Likely
it takes something over the batch (a mean, a norm, a rank, torch.nn.functional.batch_norm), of which each process has
its own; or it has a generator of its own, or asks which process it is.
""",
    "task_random": """
Every layer gives the same, and random numbers are drawn after the model: by the loss or the task (negative samples,
noise), or in the backward. Each process draws its own. Where that is meant, nothing is wrong.
""",
    "sum": """
Every layer gives the same, and all gradients are {factor} times those of one process: 1 over the number of processes.
The loss is a sum over samples where the framework asks for their mean (StepOutput.loss), which it weighs by samples.
Divide by the number of samples in the batch: reduction='mean'.
""",
    "factor": """
Every layer gives the same, and all gradients are {factor} times those of one process. The loss is divided by something
other than the samples in its batch (StepOutput.loss must be their mean), or gradients are scaled by the number of
processes somewhere: gradients reach the optimizer as the mean over processes.
""",
    "uneven": """
Every layer gives the same, and gradients don't, in a step of which each process has {shares} samples. The loss isn't
a mean over the samples of its batch: it may divide by a fixed batch size, or by something that samples have more or
less of (class weights, ignore_index, lengths), which is a mean per process and then weighed by samples.
""",
    "unused": """
{names} has a gradient on one side and none on the other: which parameters are used depends on the samples of a process.
The optimizer leaves out a parameter without a gradient, where it would decay one whose gradient is 0.
""",
    "backward": """
Every layer gives the same, and so are the gradients of other parameters; {names} isn't. Its gradient isn't that of the
loss's mean: a hook or an autograd.Function that depends on the batch, a second loss on part of the model that isn't a
mean over samples, or a parameter that is used outside of the forward that the strategy sees.
""",
    "loss": """
Every layer gives the same, and gradients don't. The loss isn't a mean over the samples of its batch, so the mean over
processes is another: class weights and ignore_index divide by weights and tokens of each process alone, contrastive
losses and losses over a whole batch see only its own samples. Use one that is a mean over samples, or gather what it
needs over processes, or accept it.
""",
    "replicas": """
The processes don't keep the same model: the first has the weights and gradients of one process, another hasn't
({names}). The strategy doesn't bring gradients together, or the optimizer draws random numbers or asks which process
it is.
""",
    "optimizer": """
All gradients are the same, and what the optimizer makes of them isn't: {names}. It depends on the number of processes
(a learning rate that is scaled by it), or draws random numbers.
""",
    "buffers": """
Gradients and weights are the same; {names} isn't. It is written in the forward from the samples of a process, and the
first process's is saved. Reduce it over processes there, if it matters.
""",
}


def heading(config: Config, processes: int, global_batch_size: int) -> str:
    """What is compared, before it is."""
    steps = config.parity.steps
    return (
        f"Comparing {config.recipe} with 1 process and with {processes}: "
        f"{steps} step{'s' if steps > 1 else ''} of {global_batch_size} samples"
    )


def failed(processes: int, global_batch_size: int, run: str) -> str:
    """What follows the report of a training that failed."""
    text = f"\nNothing was compared: the training with {processes} process{'es' if processes > 1 else ''} failed."
    if processes == 1:
        text += (
            f"\nIt takes all {global_batch_size} samples of a step in trainer.accumulate_grad_batches passes. "
            "If memory ran out, use a smaller data.global_batch_size."
        )
    return f"{text}\n  {'logs':<12} {run}/logs"


def render(answer: Mapping[str, Any]) -> str:
    """The table and the verdict."""
    lines = ["", *_table(answer), "", *_notes(answer)]
    departure = answer["departure"]
    if departure is not None:
        return "\n".join([*lines, *_departed(answer, departure)])
    if not answer["same"]:
        return "\n".join([*lines, _nothing(answer)])
    steps = f"{answer['steps']} step{'s' if answer['steps'] > 1 else ''}"
    what = "weights" if _is_sure(answer["parts"]["weights"]) else "gradients"
    lines.append(f"The same: {answer['model']} gets the same {what} from 1 process and from {answer['processes']}")
    lines[-1] += f" in {steps}, but for rounding."
    if what == "gradients":
        lines.append(f"Of the weights nothing can be said: rounding is as large as their changes. {_SHARPER}")
    alone = answer["layer_alone"]
    if alone is not None:
        lines.append(f"Yet {_layer(alone)} in step {alone['step']}, which changes no weight.")
    return "\n".join(lines)


def _table(answer: Mapping[str, Any]) -> list[str]:
    rows = [("", "compared", "off by", "allowed", "rounding", "where")]
    for part, found in answer["parts"].items():
        worst = found["greatest"]
        if worst is None:
            rows.append((part, "0", "", "", "", ""))
            continue
        where = f"{worst['name'] or answer['model']}, step {worst['step']}"
        numbers = [_number(worst[key]) for key in ("difference", "allowed", "rounding")]
        rows.append((part, str(found["compared"]), *numbers, where))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _is_sure(part: Mapping[str, Any]) -> bool:
    return part["greatest"] is not None and part["greatest"]["allowed"] < _UNSURE


def _notes(answer: Mapping[str, Any]) -> list[str]:
    found = []
    if answer["dropouts"]:
        found.append(f"Dropout was switched off in {answer['dropouts']} module{'s' if answer['dropouts'] > 1 else ''}.")
    if answer["left_out"]:
        found.append(
            f"The loss scaler skipped the optimizer in step {_listed(list(map(str, answer['left_out'])))}: "
            "there is nothing to compare."
        )
    if answer["unsure"]:
        number = len(answer["unsure"])
        found.append(
            f"Of {number} parameter{'s' if number > 1 else ''} nothing can be said, since the gradient is rounding and "
            f"nothing else: {_listed(answer['unsure'])}"
        )
    return [*found, ""] if found else []


def _departed(answer: Mapping[str, Any], departure: Mapping[str, Any]) -> list[str]:
    step, layer = departure["step"], departure["layer"]
    when = f"in step {step}" if step else "before the first step"
    lines = [f"Not the same: {answer['model']} departs {when}."]
    if layer is not None:
        lines.append(f"  {'first':<10} {_layer(layer)}")
    for part, found in departure["parts"].items():
        first, worst = found["first"], found["worst"]
        of = answer["parts"][part]["compared"] if step else None
        number = f"{found['number']} of {of}" if of else str(found["number"])
        text = f"{number} depart; first {first['name']}, {_off(first)}"
        if (worst["difference"] or 0.0) > _NOTABLE * (first["difference"] or 0.0):
            text += f"; most {worst['name']}, {_off(worst)}"
        lines.append(f"  {part:<10} {text}")
    return [*lines, "", "Probably:", *_reason(answer, departure)]


def _reason(answer: Mapping[str, Any], departure: Mapping[str, Any]) -> list[str]:
    module, factor, layer = departure["module"], departure["factor"], departure["layer"]
    name = module or answer["model"]
    if module and layer is not None and module == layer["name"]:
        name = f"{module} ({layer['type']})"
    shares: Sequence[int] = departure.get("shares", [])
    words = _REASONS[departure["reason"]].format(
        module=name,
        names=_listed(departure["names"]),
        factor="" if factor is None else f"{factor:.4g}",
        shares=" or ".join(map(str, sorted(set(shares)))),
        total=sum(shares),
    )
    return textwrap.wrap(" ".join(words.split()), _WIDTH, break_long_words=False, break_on_hyphens=False)


def _layer(layer: Mapping[str, Any]) -> str:
    """Where in the forward, and how far off."""
    off = _off(layer)
    name, kind = layer["name"], layer["kind"]
    described = f"{name} ({layer['type']})" if name else layer["type"]
    again = f", call {layer['call']}" if layer["call"] > 1 else ""
    if kind == "left":
        if layer["own"]:
            return f"the output of {described}{again}: {off}"
        before = layer["before"]
        after = "" if before is None else f" after {before['name'] or before['type']}"
        return f"the output of {described}{again}, in its own forward{after}: {off}"
    if layer["inside"] is None:
        return f"the input of {described}{again}: {off}"
    before = layer["before"]
    since = f" after {before['name']}" if before is not None and before["name"] else ""
    return f"the input of {described}{again}, made in the forward of {layer['inside'] or 'the model'}{since}: {off}"


def _off(found: Mapping[str, Any]) -> str:
    if found["difference"] is None:
        return "another size for each sample"
    where = f" on rank {found['rank']}" if found["rank"] else ""
    return f"{_number(found['difference'])} off{where} ({_number(found['allowed'])} allowed)"


def _nothing(answer: Mapping[str, Any]) -> str:
    if not answer["steps"]:
        return "Nothing was compared: the training ended before its first step."
    if len(answer["left_out"]) == answer["steps"]:
        return (
            "Nothing was compared: the loss scaler skipped the optimizer in every step, as it does until its scale "
            "fits.\nUse more: parity.steps=20, or compare in trainer.precision=32-true."
        )
    return f"Nothing can be said: rounding is as large as the gradients.\n{_SHARPER}"


def _number(value: float | None) -> str:
    if value is None:
        return "size"
    return "0" if value == 0 else f"{value:.1e}" if value < 0.01 else f"{value:.2g}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
