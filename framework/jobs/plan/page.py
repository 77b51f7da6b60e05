"""What job=plan prints: the ranks, the facts of the plan, and the commands that start the run. No torch."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from framework.config.topology import Topology
from framework.system.formatting import (
    format_binary_bytes,
    format_bytes,
    format_count,
    format_duration,
    format_rate,
    format_seconds,
    format_table,
)

_WIDTH = 100
# Of more ranks, the first and the last ones are shown.
_MAX_RANKS = 16
_SIZES = ("memory", "traffic", "checkpoint")
_SHOWN = (
    "launcher",
    "backend",
    "strategy",
    "shards",
    "optimizer",
    "batch",
    "data",
    "steps",
    "model",
    "memory",
    "traffic",
    "exchanges_every",
    "checkpoint",
    "run_dir",
)


def render(plan: Mapping[str, Any], topology: Topology) -> str:
    """Return the page for what `make_plan` returned, under the same names."""
    parts = [
        f"Plan of {plan['recipe']}: {_arithmetic(topology)}",
        rank_table(topology),
        format_table(_facts(plan, topology), width=_WIDTH),
    ]
    if len(plan["groups"]) > 1:
        parts.append(_group_table(plan["groups"]))
    if "time" in plan:
        parts += _time_parts(plan["time"])
    if "forecast" in plan:
        parts += _forecast_parts(plan["forecast"])
        parts += _device_time_parts(plan["forecast"])
    parts.append("\n".join(_start_lines(plan["commands"], topology)))
    parts += [f"Note: {note}" for note in plan["notes"]]
    return "\n\n".join(parts)


def _facts(plan: Mapping[str, Any], topology: Topology) -> list[tuple[str, str]]:
    """Return the rows of the page: a name and a text."""
    facts = []
    for key in _SHOWN:
        format_number = format_bytes if key in _SIZES else "{:,.12g}".format
        facts.append((key, _text(plan[key], format_number)))

    memory_bytes = sum(size_bytes or 0 for size_bytes in plan["memory"].values())
    rest = "activations besides"
    if "forecast" in plan:
        rest = "with activations as forecast below"
    facts.append(("on each rank", f"{format_bytes(memory_bytes)} of memory; {rest}"))

    titles = {
        "common": "environment",
        "first_rank": "of rank 0",
        "last_rank": f"of rank {topology.world_size - 1}",
    }
    for key, variables in plan["environment"].items():
        is_repeated = key == "last_rank" and topology.world_size == 1
        if variables and not is_repeated:
            settings = [f"{name}={value}" for name, value in variables.items()]
            facts.append((titles[key], " ".join(settings)))
    return facts


def _time_parts(time: Mapping[str, Any]) -> list[str]:
    """Return how long a step and the run take here, and what that rests on."""
    notes = [f"Note: {note}" for note in time["notes"]]
    if time["step_s"] is None:
        return notes
    threads = format_count(time["threads"], "thread")
    steps = format_count(time["steps"], "training step")
    title = f"Time on {time['device']}, {threads} a process: measured in {steps}"
    table = _time_table(time, counted="with validations, without checkpoints")
    return [f"{title}\n{table}", *notes]


def _device_time_parts(forecast: Mapping[str, Any]) -> Iterator[str]:
    """Yield how long a step and the run would take on the device, and what that rests on."""
    time = forecast["time"]
    if time is None:
        return
    title = f"Time on {forecast['device']['name']}, from the step's FLOPs and bytes"
    yield f"{title}\n{_time_table(time, counted='without validations and checkpoints')}"
    assumed = [f"  {assumption}" for assumption in time["assumed"]]
    yield "\n".join(["Assumed for the time", *assumed])


def _time_table(time: Mapping[str, Any], *, counted: str) -> str:
    """Return the rows for a step and the run. counted: what the time of the run has and hasn't."""
    shares = []
    for part, seconds in time["parts"].items():
        if seconds:
            shares.append(f"{part} {seconds / time['step_s']:.0%}")
    facts = [("a step", f"{format_seconds(time['step_s'])}, bound by {time['bound_by']}: {', '.join(shares)}")]
    if time["flops"] is not None:
        facts.append(("arithmetic", f"{format_rate(time['flops'], 'FLOP')} on each rank, MFU {time['mfu']:.0%}"))
    if time["hours"] is not None:
        facts.append(("the run", f"{format_duration(time['hours'] * 3600)} {counted}"))
    if time["cost"] is not None:
        facts.append(("cost", f"{time['cost']:,.2f}"))
    return format_table(facts, width=_WIDTH)


def _forecast_parts(forecast: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a step needs on a device, the changes that make it fit, and what that rests on."""
    memory = forecast["memory"]
    if memory is not None:
        yield f"{_answer(forecast, memory)}\n\n{_memory_table(forecast, memory)}"
    if forecast["changes"]:
        yield _change_table(forecast["changes"])
    for note in forecast["notes"]:
        yield f"Note: {note}"
    lines = ["Assumed"]
    for assumption in forecast["assumed"]:
        lines += textwrap.wrap(assumption, _WIDTH, initial_indent="- ", subsequent_indent="  ")
    yield "\n".join(lines)


def _answer(forecast: Mapping[str, Any], memory: Mapping[str, Any]) -> str:
    """Return if the training fits, in a sentence."""
    device = forecast["device"]
    peak = format_binary_bytes(memory["peak"])
    if memory["fits"] is None:
        return f"Memory: a rank takes up to {peak}. How much {device['name']} has isn't known."
    answer = "doesn't fit"
    if memory["fits"]:
        answer = "fits"
    usable = format_binary_bytes(device["usable"])
    return f"Memory: it {answer} on {device['name']}. A rank takes up to {peak}, and {usable} are usable."


def _memory_table(forecast: Mapping[str, Any], memory: Mapping[str, Any]) -> str:
    rows = []
    if forecast["gpus"]:
        rows.append(("fits on", ", ".join(forecast["gpus"])))
    if forecast["largest_batch"] is not None:
        rows.append(("largest batch", f"{forecast['largest_batch']:,} samples per forward"))
    at = memory["at"]
    place = f"in the {at['phase']}"
    if at["module"]:
        place += f" of {at['module']}"
    rows.append(("peak of a rank", f"{format_binary_bytes(memory['peak'])}, {place}"))
    for category, size_bytes in memory["categories"].items():
        if size_bytes:
            rows.append((category, format_binary_bytes(size_bytes)))
    modules = [f"{module} {format_binary_bytes(size_bytes)}" for module, size_bytes in memory["modules"].items()]
    if modules:
        rows.append(("by module", ", ".join(modules)))
    return format_table(rows, width=_WIDTH)


def _change_table(changes: Sequence[Mapping[str, Any]]) -> str:
    """Return a row for each change, with what a rank and a step take then."""
    title = "To make it fit, with the same global batch"
    if not any(change["fits"] for change in changes):
        title = "Nothing that was tried makes it fit; least memory, with the same global batch, is taken with"
    has_gpus = any(change["gpus"] for change in changes)
    head = ["change", "peak of a rank", "time of a step, about"]
    if has_gpus:
        head.insert(1, "GPUs")
    rows = [tuple(head)]
    for change in changes:
        row = [" ".join(change["overrides"]), format_binary_bytes(change["peak"]), f"{change['cost_percent']:+} %"]
        if has_gpus:
            row.insert(1, str(change["gpus"]))
        rows.append(tuple(row))
    return f"{title}\n{format_table(rows, width=_WIDTH)}"


def _start_lines(commands: Mapping[str, Sequence[str]], topology: Topology) -> list[str]:
    """Return the commands that start the run."""
    title = "Start it with one of"
    if topology.nnodes > 1:
        title += f" (the first two on each node, whose number is NODE: 0 to {topology.nnodes - 1})"
    lines = [title]
    for words in commands.values():
        lines.append(f"  {shlex.join(words)}")
    return lines


def _group_table(groups: Sequence[Mapping[str, Any]]) -> str:
    """Return a row for each parameter group. What no pattern matches has no name."""
    rows = [("group", "optimizer", "tensors", "parameters", "trained", "state")]
    for group in groups:
        state = "–"
        if group["state"] is not None:
            state = format_bytes(group["state"])
        rows.append(
            (
                group["name"] or "(others)",
                group["optimizer"],
                f"{group['tensors']:,}",
                f"{group['parameters']:,}",
                f"{group['trainable']:,}",
                state,
            )
        )
    return format_table(rows)


def _text(value: Any, format_number: Callable[[float], str]) -> str:
    """Return a value of the plan as text. What is unknown, empty or zero is left out."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return " and ".join(value)
    if not isinstance(value, Mapping):
        return format_number(value)

    entries = {name: entry for name, entry in value.items() if entry}
    if entries.keys() == {"least", "most"}:
        numbers = sorted(set(entries.values()))
        return " or ".join(map(format_number, numbers))
    texts = [f"{name} {_text(entry, format_number)}" for name, entry in entries.items()]
    return ", ".join(texts) or "–"


def rank_table(topology: Topology) -> str:
    """Return a row for each rank with its place and its devices."""
    rows = [("rank", "node", "local rank", "GPU" if topology.gpus_per_node else "device")]
    ranks = range(topology.world_size)
    if len(ranks) <= _MAX_RANKS:
        rows += [_rank_row(rank, topology) for rank in ranks]
    else:
        half = _MAX_RANKS // 2
        rows += [_rank_row(rank, topology) for rank in ranks[:half]]
        rows.append(("…", "…", "…", "…"))
        rows += [_rank_row(rank, topology) for rank in ranks[-half:]]
    return format_table(rows)


def _rank_row(rank: int, topology: Topology) -> tuple[str, str, str, str]:
    node, local_rank = divmod(rank, topology.procs_per_node)
    devices = topology.device_indices(local_rank)
    names = ["CPU"] * topology.span
    if devices:
        names = [str(device) for device in devices]
    return str(rank), str(node), str(local_rank), ", ".join(names)


def _arithmetic(topology: Topology) -> str:
    """Return how the number of ranks and of their devices comes about."""
    nodes = format_count(topology.nnodes, "node")
    processes = format_count(topology.procs_per_node, "process", "processes")
    text = f"{nodes} × {processes} = {format_count(topology.world_size, 'rank')}"
    if topology.gpus_per_node == 0:
        return f"{text} on the CPU"
    gpus = format_count(topology.gpus_per_node, "GPU")
    shared = " (shared)" if topology.shares_gpus else ""
    return f"{text}; {gpus} a node{shared}, {topology.span} for each rank"
