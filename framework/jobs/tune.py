"""`job=tune`: the largest batch that fits on every process, a learning rate for it, and what to type. No torch here.

The ranks start as for training, by any launcher; nothing is kept of what they train. The run directory gets
learning_rate.svg and tune.json, with these keys (null: not looked for, or not known):

    recipe, processes
    batch_size   batch_size (of one pass of a process), limited_by ("memory", "data" or a key), grain (a batch larger by
                 it was not tried or didn't fit), margin, room_bytes (on rank 0, of a process's steps),
                 global_batch_size, accumulate_grad_batches, together (whether all processes have made steps with it, as
                 in a run; before that each has by itself); trials, in order: batch_size, fits, refused_by (a rank),
                 refusal, peak_bytes (the greatest of all ranks), samples_per_s (of all, without any exchange)
    lr           global_batch_size, stopped (why before the last step), suggestion (null: the loss didn't fall, or
                 was no number; lr, begins, minimum), points: lr, loss, smoothed
    overrides    key → value, as they are typed

It is written once the batch is found, and again after the range test, so that what was found outlives what fails later.

Status 0: all that was looked for is found; 1: it isn't, or a step failed.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from framework.config.saved import key_of
from framework.config.schema import Config
from framework.errors import ConfigError
from framework.jobs.choosing import checked_topology
from framework.jobs.equivalents import commands
from framework.jobs.request import JobResult, Request
from framework.jobs.running import Words, run
from framework.jobs.summary import interruption_without_trace, look, short
from framework.run_dir import RunDir, read_object
from framework.topology import Topology

_ENTRY = "framework.tune.running:tune_rank"
_RESULT, _PICTURE = "tune.json", "learning_rate.svg"  # as `findings` has them
_LIMITS = {
    "memory": "by memory, of which {margin:.0%} is left alone",
    "data": "more would be more than all samples in a step",
}


def main(request: Request) -> JobResult:
    """Tune as asked, on any number of processes. Raises FrameworkError for what can't be done as asked."""
    topology = check(request)
    closing = partial(_closing, request=request, topology=topology)
    interrupted = partial(_interruption, request=request, topology=topology)
    done = run(request, entry=_ENTRY, words=Words("Tuning", closing, interrupted))
    found = None if done.status != 0 or done.run_dir is None else read_object(done.run_dir.path / _RESULT)
    if found is not None and found["lr"] is not None and found["lr"]["suggestion"] is None:
        return replace(done, status=1)
    return done


def check(request: Request) -> Topology:
    """What can be found wrong before anything is made."""
    if request.place is not None:
        raise ConfigError(
            "job=tune looks for the values of one run, so it can't go with a sweep (-m). Tune one of them."
        )
    return checked_topology(request)


def _closing(_config: Config, run_dir: RunDir, _status: int, *, request: Request, topology: Topology) -> str:
    """What was found, also before something failed, the command that uses it, and where all lies."""
    path, found = short(run_dir.path), read_object(run_dir.path / _RESULT)
    rows = [("run", path), ("logs", f"{path}/logs")]
    if (run_dir.path / _PICTURE).exists():
        rows.append(("plot", f"{path}/{_PICTURE}"))
    if run_dir.tensorboard.is_dir():
        rows.append(("look", look(run_dir.path)))
    lines = [] if found is None else _findings(found, request, topology)
    return "\n".join([*lines, "", *(f"  {name:<12} {text}" for name, text in rows)])


def _interruption(run_dir: RunDir, *, request: Request, topology: Topology) -> str:
    """What is said after Ctrl-C."""
    found = read_object(run_dir.path / _RESULT)
    if found is None:
        return interruption_without_trace(run_dir)
    lines = ["", "Interrupted; every process has ended. This was found before:", *_findings(found, request, topology)]
    return "\n".join([*lines, "", f"  {'run':<12} {short(run_dir.path)}"])


def _findings(found: Mapping[str, Any], request: Request, topology: Topology) -> list[str]:
    lines = ["", *described(found, scheduled=request.config.scheduler.schedule is not None)]
    if found["overrides"] and (found["batch_size"] is None or found["batch_size"]["together"]):
        lines += ["", "Use:", f"  {command(request, topology, found['overrides'])}"]
    return lines


def described(found: Mapping[str, Any], *, scheduled: bool) -> Iterator[str]:
    """The findings in a few lines. scheduled: a schedule moves the learning rate in the run."""
    batch, lr = found["batch_size"], found["lr"]
    if batch is not None:
        limit = _LIMITS.get(batch["limited_by"], f"as much as {batch['limited_by']} allows")
        passes = batch["accumulate_grad_batches"]
        times = f", {passes} passes" if passes > 1 else ""
        yield (
            f"Largest batch: {batch['batch_size']:,} for each process ({limit.format(**batch)}); "
            f"a step takes {batch['global_batch_size']:,} samples{times}"
        )
        if not batch["together"]:
            yield "  Each process has made steps with it by itself; all together haven't yet"
    if lr is None:
        return
    suggestion = lr["suggestion"]
    if suggestion is None:
        yield _without_rate(lr)
        return
    yield (
        f"Learning rate: {suggestion['lr']:.2g} for steps of {lr['global_batch_size']:,} samples, where the loss falls "
        "fastest"
    )
    yield (
        f"  It falls from {suggestion['begins']:.2g} to {suggestion['minimum']:.2g}; a tenth of the latter is more "
        f"careful: {suggestion['minimum'] / 10:.2g}"
    )
    if scheduled:
        yield "  Found without the schedule, which begins at it or leads up to it"


def _without_rate(lr: Mapping[str, Any]) -> str:
    """Why there is none, and what to do."""
    stopped, points = lr["stopped"], lr["points"]
    if points and points[-1]["loss"] is None:  # no number
        if len(points) == 1:
            return f"No learning rate: {stopped}, with the initial weights. Look at the model and the data"
        return f"No learning rate: {stopped}, and hadn't fallen before. Try lower ones: tune.min_lr"
    ended = "" if stopped is None else f" ({stopped})"
    return (
        f"No learning rate: the loss didn't fall by more than its noise{ended}. Look at the plot, and try a larger "
        "batch, more steps (tune.num_training), or other rates: tune.min_lr, tune.max_lr"
    )


def command(request: Request, topology: Topology, found: Mapping[str, Any]) -> str:
    """The user's own command as a training, with what was found; behind torchrun or srun where that started this."""
    kinds = commands(replace(request, overrides=merged(request.overrides, found)), topology)
    starter = "" if request.leader is None else request.leader.place.starter
    words = kinds.get(starter, kinds["framework"])
    if starter and starter not in kinds:  # whatever starts the ranks there, each is this command
        words = kinds["srun"][kinds["srun"].index("python") :]
    return shlex.join(words)


def merged(typed: Sequence[str], found: Mapping[str, Any]) -> tuple[str, ...]:
    """What was typed, with what was found in the place of what was typed for the same keys, or after it.

    Keys of `found` that nothing has set begin with `+`, and so do those that were typed with it.
    """
    keys = {key.lstrip("+"): key for key in found}
    texts = [text for text in typed if key_of(text) not in keys]
    for name, key in keys.items():
        before = next((text for text in typed if key_of(text) == name and "=" in text), key)
        texts.append(f"{before.partition('=')[0]}={found[key]}")
    return tuple(texts)
