"""`job=plan`: show what a run would be. Needs no GPU, downloads nothing, makes no run directory. No torch here.

`plan.format=json` prints one object with these keys (bytes, samples and steps are whole numbers; null means unknown,
and `notes` says why):

    recipe         its name
    launcher       the launcher that would start the ranks on each node
    topology       nnodes, procs_per_node, gpus_per_node, span, own_view, world_size, shares_gpus; gpus: for each local
                   rank the numbers of its GPUs, the same on every node (empty without GPUs); global rank = node ·
                   procs_per_node + local rank
    backend        name, init_method, init_timeout_s, timeout_s
    strategy       the class of the strategy
    shards         over how many ranks each copy of the model is sharded; 1 if each rank has a replica
    optimizer      the class of the optimizer, or of each
    groups         for each parameter group: name, optimizer, tensors, parameters, trainable, state (bytes)
    batch          global; per_rank and per_forward: least, most; accumulate_grad_batches; num_microbatches, into which
                   strategy=pipeline cuts each of these (1 elsewhere)
    data           train, val, test: samples; streams: the parts that are streams, whose size is unknown; source:
                   "data", "plan.train_samples" or null
    steps          per_epoch, total: optimizer steps; max_epochs, max_steps
    model          name, parameters, trainable
    memory         bytes on each rank: parameters, gradients, buckets (a second copy of gradients, to exchange them),
                   optimizer, buffers, averages, anchors (the last common weights of replicas that differ, and their
                   momentum), errors (what gradient compression left out). Not counted: activations, and what a
                   sharded model gathers
    traffic        bytes of one optimizer step: reduced (the all-reduced gradients, in the type of the exchange; or the
                   step's share of an exchange of weights); ring_per_rank (sent and received by each rank in a ring,
                   2(W−1)/W of that; for a sharded model with the gathered weights)
    exchanges_every  optimizer steps from one exchange to the next; if more than 1, weights are exchanged
    checkpoint     approximate bytes of a checkpoint; null also if none is saved
    run_dir        the pattern of its path
    environment    common: variables that are the same for all ranks; first_rank and last_rank: the others
    commands       framework, torchrun, srun: lists of words; HOST:29400 stands for an endpoint that wasn't given, NODE
                   for the number of the node
    notes          list of strings
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from framework.command.equivalents import commands, environment
from framework.command.job import Job
from framework.command.launcher import Placement, place
from framework.command.request import JobResult, Request
from framework.config.checks import validation_mistakes
from framework.config.schema import Config
from framework.config.topology import Topology
from framework.launch.fork_server import call_in_child
from framework.system.formatting import format_bytes, format_count, format_table

_WIDTH = 100
_MAX_RANKS = 16  # of more, the first and the last ones are shown
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


class Plan(Job):
    """Print what a run would be."""

    needs_ranks = False
    sweepable = False
    sections = ("plan",)

    def mistakes(self, config: Config) -> Iterator[str]:
        return validation_mistakes(config)

    def run(self, request: Request) -> JobResult:
        """Print the plan. Raises FrameworkError for what training as asked would refuse."""
        # `trainer.gpus` needn't exist here.
        placement = place(request.config, external_ranks=request.external_ranks, is_planned=True)
        plan = make_plan(request, placement)
        if request.config.plan.format == "json":
            print(json.dumps(plan, indent=2), flush=True)
        else:
            print(render(plan, placement.topology), flush=True)
        return JobResult(0)


def make_plan(request: Request, placement: Placement) -> dict[str, Any]:
    """Return the object described above. A child of the fork server computes what needs torch."""
    config = request.config
    topology = placement.topology
    estimates = call_in_child(
        request.fork_server,
        "framework.jobs.plan.estimate:estimate",
        {"config": dict(request.raw), "topology": asdict(topology), "backend": placement.backend},
        timeout_s=config.backend.init_timeout,
    )
    return {
        "recipe": config.recipe,
        "launcher": placement.launcher.name,
        "topology": {
            **asdict(topology),
            "world_size": topology.world_size,
            "shares_gpus": topology.shares_gpus,
            "gpus": [topology.device_indices(local_rank) for local_rank in range(topology.procs_per_node)],
        },
        "backend": {
            "name": placement.backend,
            "init_method": config.backend.init_method,
            "init_timeout_s": config.backend.init_timeout,
            "timeout_s": config.backend.timeout,
        },
        **estimates,
        "run_dir": str(Path(config.path.outputs, config.recipe, "<date>_<time>_<4 hex>")),
        "environment": environment(config, topology),
        "commands": commands(request, topology, own_keys=Plan.sections),
    }


# The page for the terminal


def render(plan: Mapping[str, Any], topology: Topology) -> str:
    """Return the page for what `make_plan` returned, under the same names."""
    parts = [
        f"Plan of {plan['recipe']}: {_arithmetic(topology)}",
        rank_table(topology),
        format_table(_facts(plan, topology), width=_WIDTH),
    ]
    start = _start_lines(plan["commands"], topology)
    if len(plan["groups"]) > 1:
        start = [_group_table(plan["groups"]), "", *start]
    parts.append("\n".join(start))
    parts += [f"Note: {note}" for note in plan["notes"]]
    return "\n\n".join(parts)


def _facts(plan: Mapping[str, Any], topology: Topology) -> list[tuple[str, str]]:
    """Return the rows of the page: a name and a text."""
    facts = []
    for key in _SHOWN:
        format_number = format_bytes if key in _SIZES else "{:,.12g}".format
        facts.append((key, _text(plan[key], format_number)))

    memory_bytes = sum(size_bytes or 0 for size_bytes in plan["memory"].values())
    facts.append(("on each rank", f"{format_bytes(memory_bytes)} of memory; activations besides"))

    titles = {
        "common": "environment",
        "first_rank": "of rank 0",
        "last_rank": f"of rank {topology.world_size - 1}",
    }
    for key, variables in plan["environment"].items():
        if variables:
            settings = [f"{name}={value}" for name, value in variables.items()]
            facts.append((titles[key], " ".join(settings)))
    return facts


def _start_lines(commands: Mapping[str, Sequence[str]], topology: Topology) -> list[str]:
    """Return the commands that start the run."""
    title = "Start it with one of"
    if topology.nnodes > 1:
        title += f" (the first two on each node, whose number is NODE: 0 to {topology.nnodes - 1})"
    return [title, *(f"  {shlex.join(words)}" for words in commands.values())]


def _group_table(groups: Sequence[Mapping[str, Any]]) -> str:
    """Return a row for each parameter group. What no pattern matches has no name."""
    rows = [("group", "optimizer", "tensors", "parameters", "trained", "state")]
    for group in groups:
        state_bytes = group["state"]
        rows.append(
            (
                group["name"] or "(others)",
                group["optimizer"],
                f"{group['tensors']:,}",
                f"{group['parameters']:,}",
                f"{group['trainable']:,}",
                "–" if state_bytes is None else format_bytes(state_bytes),
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
    names = [str(device) for device in devices] if devices else ["CPU"] * topology.span
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
