"""`job=plan`: what a run would be, shown before anything starts. No GPU, no download, no run directory; no torch here.

With `plan.format=json` one object is printed, with these keys (bytes, samples and steps are whole numbers; null: not
known, and `notes` says why):

    recipe         its name
    launcher       the launcher that would start the ranks on each node
    topology       nnodes, procs_per_node, gpus_per_node, span, world_size, shares_gpus; gpus: for each local rank the
                   numbers of its GPUs, the same on every node (empty without GPUs); global rank = node · procs_per_node
                   + local rank
    backend        name, init_method, init_timeout_s, timeout_s
    strategy       the class of the strategy
    spread         whether copies of the model are spread over ranks; each else has a replica
    spread_over    over how many ranks each copy is
    optimizer      the class of the optimizer
    batch          global; per_rank and per_forward: least, most; accumulate_grad_batches; num_microbatches, into which
                   strategy=pipeline cuts each of these (1 elsewhere)
    data           train, val, test: samples; streams: the parts that are streams, of which nobody knows that; source:
                   "data", "plan.train_samples" or null
    steps          per_epoch, total: optimizer steps; max_epochs, max_steps
    model          name, parameters, trainable
    memory         bytes on each rank: parameters, gradients, buckets (a second copy of gradients, to exchange them),
                   optimizer, buffers, averages, anchors (what a strategy keeps of weights that replicas had in common,
                   and its momentum), errors (what it left out of gradients, once it has begun to); activations aside,
                   and what is gathered of a model that is spread
    traffic        bytes of one optimizer step: reduced (the gradients, all-reduced over all ranks, in the format that
                   is done in; or the step's share of an exchange of weights); ring_per_rank: what each rank sends and
                   receives where that goes around in a ring, 2(W−1)/W of them; where the model is spread, with the
                   weights that are gathered
    exchanges_every  optimizer steps from one such exchange to the next; weights are what is exchanged where they are
                   several, but in a warm-up
    checkpoint     about how many bytes each checkpoint takes; null also where none is saved
    run_dir        the pattern of its path
    environment    common: variables that are the same for all ranks; first_rank and last_rank: the others
    commands       framework, torchrun, srun: lists of words; HOST:29400 stands for an endpoint that wasn't given, NODE
                   for the number of the node
    notes          list of texts
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from framework.config.schema import PlanFormat
from framework.errors import ConfigError
from framework.jobs.choosing import backend_name, checked_topology, chosen_launcher
from framework.jobs.equivalents import commands, environment, hidden_gpus
from framework.jobs.plan_text import render
from framework.jobs.request import JobResult, Request
from framework.launch.errand import ask
from framework.topology import Topology


def main(request: Request) -> JobResult:
    """Print the plan. Raises FrameworkError for what training as asked would refuse."""
    plan = make_plan(request, check(request))
    print(json.dumps(plan, indent=2) if request.config.plan.format is PlanFormat.JSON else render(plan), flush=True)
    return JobResult(0)


def check(request: Request) -> Topology:
    """What can be found wrong without torch, as for a training. GPUs that were asked for by number needn't be there."""
    if request.place is not None:
        raise ConfigError("job=plan shows one run, so it can't go with a sweep (-m). Plan one of its jobs.")
    return checked_topology(request, is_planned=True)


def make_plan(request: Request, topology: Topology) -> dict[str, Any]:
    """The object described above. What needs torch is asked of a child of the fork server."""
    config = request.config
    backend = backend_name(config, topology).value
    facts = ask(
        request.warm,
        "framework.planning:answer",
        {"config": dict(request.raw), "topology": asdict(topology), "backend": backend},
        timeout_s=config.backend.init_timeout,
    )
    config_bytes = len(json.dumps(request.raw))
    return {
        "recipe": config.recipe,
        "launcher": chosen_launcher(request, is_planned=True),
        "topology": {
            "nnodes": topology.nnodes,
            "procs_per_node": topology.procs_per_node,
            "gpus_per_node": topology.gpus_per_node,
            "span": topology.span,
            "world_size": topology.world_size,
            "shares_gpus": topology.shares_gpus,
            "gpus": [topology.device_indices(local) for local in range(topology.procs_per_node)],
        },
        "backend": {
            "name": backend,
            "init_method": config.backend.init_method.value,
            "init_timeout_s": config.backend.init_timeout,
            "timeout_s": config.backend.timeout,
        },
        **facts,
        "checkpoint": None if facts["checkpoint"] is None else facts["checkpoint"] + config_bytes,
        "run_dir": str(Path(config.path.outputs, config.recipe, "<date>_<time>_<4 hex>")),
        "environment": environment(config, topology),
        "commands": commands(request, topology),
        "notes": [*facts["notes"], *hidden_gpus(topology)],
    }
