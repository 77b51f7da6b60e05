"""`job=tune`: find the largest batch that fits on every process and a learning rate for it. No torch here.

The ranks start as for training, by any launcher. The run directory gets learning_rate.svg and tune.json, with these
keys (null: not searched for, or not known):

    recipe, processes
    batch_size   batch_size (of one pass of a process), limited_by ("memory", "data" or a key), margin, room_bytes (on
                 rank 0, for a process's steps), global_batch_size, accumulate_grad_batches; trials, in order:
                 batch_size, fits, refused_by (a rank), refusal, peak_bytes (the largest of all ranks), samples_per_s
                 (of all ranks, without exchanging gradients)
    lr           global_batch_size, stopped (why the test ended early), suggestion (lr, begins, minimum; null: the loss
                 didn't fall or wasn't finite), points: lr, loss, smoothed
    overrides    key → value, as on the command line

It is written when the batch is found, and again after the range test.

Exit status 0: everything was found; 1: it wasn't, or a step failed.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from framework.command.equivalents import commands
from framework.command.request import JobResult, Request
from framework.command.run_ranks import run
from framework.config.saved import key_of, merge_overrides
from framework.config.schema import Config
from framework.config.topology import Topology
from framework.system.formatting import display_path, format_facts
from framework.system.run_dir import RunDir, read_object

RESULT, PLOT = "tune.json", "learning_rate.svg"  # in the run directory
_LIMITS = {
    "memory": "by memory, of which {margin:.0%} stays free",
    "data": "a step takes no more samples than the dataset has",
}


def main(request: Request) -> JobResult:
    """Tune with any number of processes. Raises FrameworkError for what can't be tuned."""
    topology = request.placement.topology

    def closing(_config: Config, run_dir: RunDir, status: int) -> str:
        path, found = display_path(run_dir.path), read_object(run_dir.path / RESULT)
        facts = [("run", path), ("logs", f"{path}/logs")]
        if (run_dir.path / PLOT).exists():
            facts.append(("plot", f"{path}/{PLOT}"))
        lines = [] if found is None else ["", *_findings(found, request.config)]
        if found is not None and found["overrides"] and status == 0:
            lines += ["", "Use:", f"  {command(request, topology, found['overrides'])}"]
        return "\n".join([*lines, "", format_facts(facts)])

    done = run(request, entry="framework.jobs.tune.rank:tune_rank", title="Tuning", summary=closing)
    found = None if done.status != 0 or done.run_dir is None else read_object(done.run_dir.path / RESULT)
    if found is not None and found["lr"] is not None and found["lr"]["suggestion"] is None:
        return replace(done, status=1)
    return done


def _findings(found: Mapping[str, Any], config: Config) -> Iterator[str]:
    batch, lr = found["batch_size"], found["lr"]
    if batch is not None:
        limit = _LIMITS.get(batch["limited_by"], f"as much as {batch['limited_by']} allows").format(**batch)
        passes = batch["accumulate_grad_batches"]
        yield (
            f"Largest batch: {batch['batch_size']:,} for each process ({limit}); a step takes "
            f"{batch['global_batch_size']:,} samples{f', {passes} passes' if passes > 1 else ''}"
        )
    if lr is None:
        return
    best = lr["suggestion"]
    if best is None:
        stopped = f" ({lr['stopped']})" if lr["stopped"] else ""
        yield (
            f"No learning rate: the loss didn't fall by more than its noise{stopped}. Look at the plot, and try a "
            "larger batch, more steps (tune.num_training), or other rates: tune.min_lr, tune.max_lr"
        )
        return
    samples = f"{lr['global_batch_size']:,} samples"
    yield f"Learning rate: {best['lr']:.2g} for steps of {samples}, where the loss falls fastest"
    yield (
        f"  It falls from {best['begins']:.2g} to {best['minimum']:.2g}; a tenth of the latter is more careful: "
        f"{best['minimum'] / 10:.2g}"
    )
    if config.scheduler.schedule is not None:
        yield "  Found without the schedule, which starts at this rate or leads up to it"


def command(request: Request, topology: Topology, found: Mapping[str, Any]) -> str:
    """Return the user's command as a training with what was found, behind torchrun or srun if they started this one."""
    special = {key_of(text) for text in request.overrides if text.startswith(("+", "~"))}
    new = [f"{'++' if key in special else ''}{key}={value}" for key, value in found.items()]
    kinds = commands(replace(request, overrides=tuple(merge_overrides(request.overrides, new))), topology)
    starter = "" if request.external_ranks is None else request.external_ranks.cluster.starter
    return shlex.join(kinds.get(starter, kinds["framework"]))
