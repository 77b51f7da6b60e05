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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from framework.command.equivalents import commands, environment
from framework.command.launcher import Placement, place
from framework.command.request import JobResult, Request
from framework.config.topology import Topology
from framework.launch.fork_server import call_in_child
from framework.system.formatting import format_bytes, format_count, format_table

_WIDTH = 100
_MAX_RANKS = 16  # of more, the first and the last ones are shown
_SIZES = ("memory", "traffic", "checkpoint")
_SHOWN = (
    *("launcher", "backend", "strategy", "shards", "optimizer", "batch", "data", "steps", "model", "memory"),
    *("traffic", "exchanges_every", "checkpoint", "run_dir"),
)


def main(request: Request) -> JobResult:
    """Print the plan. Raises FrameworkError for what training as asked would refuse."""
    # `trainer.gpus` needn't exist here.
    placement = place(request.config, external_ranks=request.external_ranks, is_planned=True)
    topology = placement.topology
    plan = make_plan(request, placement)
    is_json = request.config.plan.format == "json"
    print(json.dumps(plan, indent=2) if is_json else render(plan, topology), flush=True)
    return JobResult(0)


def make_plan(request: Request, placement: Placement) -> dict[str, Any]:
    """Return the object described above. A child of the fork server computes what needs torch."""
    config = request.config
    topology = placement.topology
    facts = call_in_child(
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
            "gpus": [topology.device_indices(local) for local in range(topology.procs_per_node)],
        },
        "backend": {
            "name": placement.backend,
            "init_method": config.backend.init_method,
            "init_timeout_s": config.backend.init_timeout,
            "timeout_s": config.backend.timeout,
        },
        **facts,
        "run_dir": str(Path(config.path.outputs, config.recipe, "<date>_<time>_<4 hex>")),
        "environment": environment(config, placement.topology),
        "commands": commands(request, placement.topology),
    }


# The page for the terminal


def render(plan: Mapping[str, Any], topology: Topology) -> str:
    """Return the page for what `make_plan` returned, under the same names."""
    format_number = "{:,.12g}".format
    facts = [(key, _text(plan[key], format_bytes if key in _SIZES else format_number)) for key in _SHOWN]
    together = format_bytes(sum(size or 0 for size in plan["memory"].values()))
    facts.append(("on each rank", f"{together} of memory; activations besides"))
    names = {"common": "environment", "first_rank": "of rank 0", "last_rank": f"of rank {topology.world_size - 1}"}
    facts += [
        (names[key], " ".join(map("=".join, found.items()))) for key, found in plan["environment"].items() if found
    ]
    several = f" (the first two on each node, whose number is NODE: 0 to {topology.nnodes - 1})"
    start = [f"Start it with one of{several if topology.nnodes > 1 else ''}"]
    start += [f"  {shlex.join(words)}" for words in plan["commands"].values()]
    notes = [f"Note: {note}" for note in plan["notes"]]
    if len(plan["groups"]) > 1:
        start = [_group_table(plan["groups"]), "", *start]
    title = f"Plan of {plan['recipe']}: {_arithmetic(topology)}"
    return "\n\n".join([title, rank_table(topology), format_table(facts, width=_WIDTH), "\n".join(start), *notes])


def _group_table(groups: Sequence[Mapping[str, Any]]) -> str:
    """Return a row for each parameter group. What no pattern matches has no name."""
    rows = [("group", "optimizer", "tensors", "parameters", "trained", "state")]
    for each in groups:
        numbers = (f"{each[key]:,}" for key in ("tensors", "parameters", "trainable"))
        state = "–" if each["state"] is None else format_bytes(each["state"])
        rows.append((each["name"] or "(others)", each["optimizer"], *numbers, state))
    return format_table(rows)


def _text(value: Any, number: Callable[[float], str]) -> str:
    """Return a value as text, its numbers as `number` formats them. What is unknown, empty or zero is left out."""
    if isinstance(value, Mapping):
        there = {name: each for name, each in value.items() if each}
        if there.keys() == {"least", "most"}:
            return " or ".join(map(number, sorted(set(there.values()))))
        return ", ".join(f"{name} {_text(each, number)}" for name, each in there.items()) or "–"
    if isinstance(value, list):
        return " and ".join(value)
    return "–" if value is None else value if isinstance(value, str) else number(value)


def rank_table(topology: Topology) -> str:
    """Return a row for each rank with its place and its devices."""
    world, half = topology.world_size, _MAX_RANKS // 2
    rows = [("rank", "node", "local rank", "GPU" if topology.gpus_per_node else "device")]
    for rank in range(world) if world <= _MAX_RANKS else (*range(half), *range(world - half, world)):
        if rank == world - half and world > _MAX_RANKS:
            rows.append(("…",) * 4)
        node, local = divmod(rank, topology.procs_per_node)
        devices = ", ".join(map(str, topology.device_indices(local))) or ", ".join(["CPU"] * topology.span)
        rows.append((str(rank), str(node), str(local), devices))
    return format_table(rows)


def _arithmetic(topology: Topology) -> str:
    world, procs = topology.world_size, topology.procs_per_node
    ranks = format_count(world, "rank")
    nodes = f"{format_count(topology.nnodes, 'node')} × {format_count(procs, 'process', 'processes')} = {ranks}"
    if topology.gpus_per_node == 0:
        return f"{nodes} on the CPU"
    shared = " (shared)" if topology.shares_gpus else ""
    return f"{nodes}; {format_count(topology.gpus_per_node, 'GPU')} a node{shared}, {topology.span} for each rank"
