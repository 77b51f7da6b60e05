"""`job=plan`: show what a run would be. Needs no GPU, downloads nothing, makes no run directory. No torch here.

`format=json` (or `plan.format=json`) prints one object with these keys (bytes, samples and steps are whole numbers;
null means unknown, and `notes` says why):

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
    time           with plan.measure: device, threads (of a process); steps, how many were made; step_s, null if none
                   could be, and its parts in seconds: compute and memory (what operators take that the one or the
                   other bounds), overhead (Python, autograd, and operators too small to be fast), exchange (waiting
                   for other ranks), data; bound_by (the largest part), flops (of a step on each rank), mfu (their
                   share of what matrix products reach here), both null if they can't be counted; validation_s; hours
                   (of all steps and validations; null if the number of steps is unknown), cost (with
                   plan.price_per_hour); notes
    forecast       with plan.device: device (name, memory, usable: what torch's allocator may take of it); memory, null
                   if it isn't known: peak (bytes of a rank), fits, categories (bytes at the peak), modules (that take
                   most), at (operator, module and phase of the peak); largest_batch: samples of a micro-batch; gpus:
                   those of the list that it fits on, the smallest first; changes, if it doesn't fit, the cheapest
                   first: overrides, gpus (of all nodes), peak, fits, cost_percent (about how much longer a step
                   computes); time (null if it isn't known): as above, of a step and of all steps,
                   from data sheets; assumed and notes: lists of strings
    run_dir        the pattern of its path
    environment    common: variables that are the same for all ranks; first_rank and last_rank: the others
    commands       framework, torchrun, srun: lists of words; HOST:29400 stands for an endpoint that wasn't given, NODE
                   for the number of the node
    notes          list of strings
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from framework.command.equivalents import commands, environment
from framework.command.job import Job
from framework.command.launcher import Placement, place, placement_mistakes
from framework.command.request import JobResult, Request
from framework.config.checks import validation_mistakes
from framework.config.mistakes import raise_mistakes
from framework.config.schema import Config
from framework.jobs.plan.duration import measured_time
from framework.jobs.plan.page import render
from framework.launch.fork_server import call_in_child
from framework.system.output import answer


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
        raise_mistakes(placement_mistakes(request.config, placement, trains=True))
        plan = make_plan(request, placement)
        if request.config.plan.measure:
            plan["time"] = measured_time(request, plan)
        if not self.answers_json(request):
            answer(render(plan, placement.topology))
        return JobResult(0, results=plan)

    def answers_json(self, request: Request) -> bool:
        return request.as_json or request.config.plan.format == "json"

    def document(self, request: Request, result: JobResult) -> Any:
        return result.results


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
        "run_dir": "/".join([config.path.outputs.rstrip("/"), config.recipe, "<date>_<time>_<4 hex>"]),
        "environment": environment(config, topology),
        "commands": commands(request, topology, own_keys=Plan.sections),
    }
