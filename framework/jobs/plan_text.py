"""A plan as a page for the terminal, at most `WIDTH` columns wide but where one word is longer."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from framework.jobs.drawing import WIDTH, draw, numbers
from framework.topology import Topology

_NAME_WIDTH = 16
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def render(plan: Mapping[str, Any]) -> str:
    """The page for what `make_plan` gives."""
    fields = ("nnodes", "procs_per_node", "gpus_per_node", "span")
    topology = Topology(**{name: plan["topology"][name] for name in fields})
    sections = [
        f"Plan of {plan['recipe']}: {_arithmetic(topology)}",
        draw(topology),
        _rows([*_setting(plan, topology), *_pace(plan)]),
        _rows(_sizes(plan)),
        _rows([("run directory", plan["run_dir"])]),
        _environment(plan["environment"], last_rank=topology.world_size - 1),
        _commands(plan["commands"], nodes=topology.nnodes),
        *(f"Note: {note}" for note in plan["notes"]),
    ]
    return "\n\n".join(sections)


def sized(number: int) -> str:
    """Bytes in three digits and a decimal unit: `660 B`, `4.80 MB`."""
    amount, unit = float(number), 0
    while amount >= 999.5 and unit < len(_UNITS) - 1:
        amount, unit = amount / 1000, unit + 1
    digits = 0 if unit == 0 or amount >= 99.95 else 1 if amount >= 9.995 else 2
    return f"{amount:.{digits}f} {_UNITS[unit]}"


def _arithmetic(topology: Topology) -> str:
    """How many ranks that makes, and of what."""
    world, procs = topology.world_size, topology.procs_per_node
    ranks = _counted(world, "rank")
    nodes = f"{_counted(topology.nnodes, 'node')} × {_counted(procs, 'process', 'processes')} = {ranks}"
    if topology.gpus_per_node == 0:
        return f"{nodes} on the CPU"
    shared = " (shared)" if topology.shares_gpus else ""
    return f"{nodes}; {_counted(topology.gpus_per_node, 'GPU')} a node{shared}, {topology.span} for each rank"


def _setting(plan: Mapping[str, Any], topology: Topology) -> list[tuple[str, str]]:
    backend = plan["backend"]
    why = ", as GPUs are shared" if topology.shares_gpus and backend["name"] == "gloo" else ""
    limits = (
        f"set-up within {_duration(backend['init_timeout_s'])}, then {_duration(backend['timeout_s'])} a collective"
    )
    return [
        ("launcher", plan["launcher"]),
        ("backend", f"{backend['name']}{why}, meeting by {backend['init_method']}; {limits}"),
        ("strategy", f"{plan['strategy']}, {_replicas(topology, plan['spread_over'] if plan['spread'] else None)}"),
    ]


def _replicas(topology: Topology, spread_over: int | None) -> str:
    """spread_over: how many ranks each copy; None where each has a replica."""
    if spread_over is not None:
        over = f"spread over {_counted(spread_over, 'rank')}"
        copies = topology.world_size // spread_over
        return f"one copy of the model, {over}" if copies == 1 else f"{copies:,} copies of the model, each {over}"
    kind = "single-device" if topology.span == 1 else "model-parallel"
    how = "" if topology.span == 1 else f": the model places itself on the {topology.span} devices of its rank"
    return f"{_counted(topology.world_size, f'{kind} replica')}{how}"


def _pace(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Samples, batches and steps."""
    batch, data, steps = plan["batch"], plan["data"], plan["steps"]
    number = batch["accumulate_grad_batches"] * batch["num_microbatches"]
    passes = f" in {number} passes of {_range(batch['per_forward'])}" if number > 1 else ""
    rows = [("batch", f"{_range(batch['per_rank'])} on each rank{passes}, {batch['global']:,} global")]
    if data["source"] is None:
        samples = "unknown, the data isn't here"
    else:
        known = [
            f"a stream {word}" if part in data["streams"] else f"{data[part]:,} {word}"
            for part, word in _PARTS
            if part in data["streams"] or data[part] is not None
        ]
        samples = ", ".join(known) + (" (plan.train_samples)" if data["source"] != "data" else "")
    per_epoch = "unknown" if steps["per_epoch"] is None else f"{steps['per_epoch']:,}"
    total = "" if steps["total"] is None else f", {steps['total']:,} in all"
    limits = [f"trainer.{name}={steps[name]}" for name in ("max_epochs", "max_steps") if steps[name] is not None]
    return [("samples", samples), *rows, ("steps", f"{per_epoch} an epoch{total} ({', '.join(limits)})")]


_PARTS = (("train", "to train with"), ("val", "to validate"), ("test", "to test"))


def _sizes(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    model, memory, traffic = plan["model"], plan["memory"], plan["traffic"]
    trainable = "all trainable" if model["trainable"] == model["parameters"] else f"{model['trainable']:,} trainable"
    names = {"optimizer": f"optimizer ({plan['optimizer']})"}
    shown = [f"{names.get(name, name)} {_known(size)}" for name, size in memory.items() if size != 0]
    together = sum(size for size in memory.values() if size is not None)
    least = "at least " if memory["optimizer"] is None else ""
    reduced = f"nothing, there is one {'rank' if not plan['spread'] else 'copy of each parameter'}"
    if traffic["reduced"]:
        ring = sized(traffic["ring_per_rank"])
        every = plan["exchanges_every"]
        what = "gradients" if every == 1 else f"weights, exchanged every {every} steps"
        reduced = f"{sized(traffic['reduced'])} of {what}; in a ring each rank sends and receives {ring}"
    return [
        ("model", f"{model['name']}, {model['parameters']:,} parameters, {trainable}"),
        ("on each rank", f"{least}{sized(together)} = " + " + ".join(shown) + "; activations besides"),
        ("reduced a step", reduced),
        ("checkpoint", _checkpoint(plan)),
    ]


def _checkpoint(plan: Mapping[str, Any]) -> str:
    if plan["checkpoint"] is not None:
        return f"about {sized(plan['checkpoint'])}"
    return "of unknown size" if plan["memory"]["optimizer"] is None else "none is saved"


def _environment(found: Mapping[str, Mapping[str, str]], *, last_rank: int) -> str:
    if not found["common"]:
        return "Environment of the rank: this command's own, it is this process"
    title = "Environment of each rank"
    common = _wrapped([f"{name}={value}" for name, value in found["common"].items()], indent="  ")
    first, last = found["first_rank"], found["last_rank"]
    own = [" ".join(f"{name}={value}" for name, value in each.items()) for each in (first, last)]
    labels = ["rank 0", f"rank {last_rank}"][: 1 if last_rank == 0 else 2]
    return "\n".join([title, *common, _rows(list(zip(labels, own, strict=False)))])


def _commands(found: Mapping[str, Sequence[str]], *, nodes: int) -> str:
    each = "" if nodes == 1 else f" on each node, with its number ({numbers(range(nodes))}) for NODE"
    titles = {
        "framework": f"Start it{each}",
        "torchrun": "or with torchrun" + ("" if nodes == 1 else " on each node"),
        "srun": "or with SLURM",
    }
    blocks = []
    for name, title in titles.items():
        lines = _wrapped(_command_words(found[name]), indent="  ", end=" \\", further="      ")
        blocks.append("\n".join([title, *lines]))
    return "\n".join(blocks)


def _command_words(words: Sequence[str]) -> list[str]:
    """Quoted for a shell; `-m` and the module it names stay on one line."""
    quoted = [shlex.quote(word) for word in words]
    at = quoted.index("-m")
    return [*quoted[:at], " ".join(quoted[at : at + 2]), *quoted[at + 2 :]]


def _rows(rows: Sequence[tuple[str, str]]) -> str:
    lines = []
    for name, text in rows:
        first = f"  {name:<{_NAME_WIDTH}}"
        wrapped = textwrap.wrap(text, WIDTH - len(first), break_long_words=False, break_on_hyphens=False)
        lines += [first + ("\n" + " " * len(first)).join(wrapped)]
    return "\n".join(lines)


def _wrapped(words: Sequence[str], *, indent: str, end: str = "", further: str = "  ") -> list[str]:
    """Lines of whole words, each but the last with `end`; those after the first are indented by `further`."""
    lines = [indent + words[0]]
    for word in words[1:]:
        if len(lines[-1]) + 1 + len(word) + len(end) > WIDTH:
            lines[-1] += end
            lines.append(further + word)
        else:
            lines[-1] += f" {word}"
    return lines


def _counted(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _range(bounds: Mapping[str, int]) -> str:
    least, most = bounds["least"], bounds["most"]
    return f"{least:,}" if least == most else f"{least:,} or {most:,}"


def _known(size: int | None) -> str:
    return "unknown" if size is None else sized(size)


def _duration(seconds: float) -> str:
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= length and seconds % length == 0:
            return f"{seconds // length:g} {unit}"
    return f"{seconds:g} s"
