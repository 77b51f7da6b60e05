"""`job=tune`: find the largest batch that fits on every process and a learning rate for it. No torch here.

The ranks start as for training, by any launcher. The run directory gets learning_rate.svg and tune.json, with these
keys (null: not searched for, or not known):

    recipe, processes
    forecast     points: pairs of a batch of one pass and the bytes that a step is forecast to take with it besides the
                 model's weights; recomputing: the same with activation checkpointing, for a global batch; note: why
                 there are none
    batch_size   batch_size (of one pass of a process), limited_by ("memory", "data" or a key), margin, room_bytes (on
                 rank 0, for a process's steps), global_batch_size, accumulate_grad_batches, recomputes; proposals:
                 for each search, batch_size, accumulate_grad_batches, samples_per_s, overrides; trials, in order:
                 batch_size, fits, refused_by (a rank), refusal, peak_bytes (the largest of all ranks), samples_per_s
                 (of all ranks, without exchanging gradients)
    lr           global_batch_size, stopped (why the test ended early), suggestion (lr, begins, minimum; null: the loss
                 didn't fall or wasn't finite), points: lr, loss, smoothed
    overrides    key → value, as on the command line

It is written with the forecast, when the batch is found, and after the range test.

Exit status 0: everything was found; 1: it wasn't, or a step failed.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from framework.command.equivalents import commands
from framework.command.job import Job
from framework.command.request import JobResult, Request
from framework.config.overrides import key_of, merge_overrides
from framework.config.schema import Config
from framework.config.topology import Topology
from framework.errors import FrameworkError, LaunchError
from framework.jobs.tune.findings import PLOT, RESULT, batch_lines, lr_lines
from framework.launch.fork_server import call_in_child
from framework.system.formatting import display_path, format_facts
from framework.system.run_dir import RunDir, read_object, write_object
from framework.system.shown_text import shown

if TYPE_CHECKING:
    from framework.launch.plan import MonitorLink, RankArguments


class Tune(Job):
    """Tune with any number of processes."""

    sweepable = False
    sections = ("tune",)

    def mistakes(self, config: Config) -> Iterator[str]:
        settings = config.tune
        if settings.min_lr >= settings.max_lr:
            yield f"tune.min_lr={settings.min_lr:g} must be less than tune.max_lr={settings.max_lr:g}."
        for name in ("fast_dev_run", "overfit_batches"):
            if getattr(config.trainer, name):
                yield f"trainer.{name} can't go with job=tune: what suits a few samples may not suit all. Leave it out."

    def title(self, config: Config) -> str:
        return "Tuning"

    def run(self, request: Request) -> JobResult:
        """Tune. The exit status is 1 if no learning rate was found."""
        result = super().run(request)
        if result.status != 0 or result.run_dir is None:
            return result
        tuned = read_object(result.run_dir.path / RESULT)
        if tuned is not None and tuned["lr"] is not None and tuned["lr"]["suggestion"] is None:
            return replace(result, status=1)
        return result

    def prepare(self, request: Request, run_dir: RunDir) -> None:
        """Write tune.json with the forecast that the search for the batch starts from."""
        tuned: dict[str, Any] = {
            "recipe": request.config.recipe,
            "processes": request.placement.topology.world_size,
            "forecast": None,
            "batch_size": None,
            "lr": None,
            "overrides": {},
        }
        if request.config.tune.find_batch_size:
            tuned["forecast"] = _forecast(request)
        write_object(run_dir.path / RESULT, tuned)

    def rank(self, arguments: RankArguments, link: MonitorLink) -> None:
        from framework.jobs.tune.rank import tune_rank

        tune_rank(arguments, link)

    def document(self, request: Request, result: JobResult) -> dict[str, Any]:
        """Return the run's facts, with the content of tune.json as its results."""
        from framework.command.document import document_of

        tuned = None
        if result.run_dir is not None:
            tuned = read_object(result.run_dir.path / RESULT)
        return document_of(request, result, results=tuned)

    def text(self, request: Request, run_dir: RunDir, *, status: int) -> str:
        """Return the batch and the learning rate, and the command to train with them."""
        lines = []
        tuned = read_object(run_dir.path / RESULT)
        if tuned is not None:
            lines += [""]
            lines += batch_lines(tuned["batch_size"])
            lines += lr_lines(tuned["lr"], has_schedule=request.config.scheduler.schedule is not None)
            if tuned["overrides"] and status == 0:
                command = training_command(request, request.placement.topology, tuned["overrides"])
                lines += ["", "Use:", f"  {command}"]

        path = display_path(run_dir.path)
        facts = [("run", path), ("logs", f"{path}/logs")]
        if (run_dir.path / PLOT).exists():
            facts.append(("plot", f"{path}/{PLOT}"))
        return "\n".join([*lines, "", format_facts(facts)])


def _forecast(request: Request) -> dict[str, Any]:
    """Return `forecast` of tune.json, and print why there is none."""
    arguments = {
        "config": dict(request.raw),
        "topology": asdict(request.placement.topology),
    }
    timeout_s = request.config.backend.init_timeout
    try:
        forecast = call_in_child(
            request.fork_server,
            "framework.jobs.tune.forecast:forecast_sizes",
            arguments,
            timeout_s=timeout_s,
            purpose="forecast the memory",
        )
    except LaunchError:
        forecast = {"points": [], "recomputing": [], "note": f"it took more than backend.init_timeout={timeout_s:g} s"}
    except FrameworkError as error:
        forecast = {"points": [], "recomputing": [], "note": str(error)}
    if forecast["note"] is not None:
        note = shorten(forecast["note"], 150, placeholder="…")
        print(shown(f"The search doubles the batch, without a forecast: {note}"), flush=True)
    return forecast


def training_command(request: Request, topology: Topology, tuned: Mapping[str, Any]) -> str:
    """Return the user's command as a training with the tuned values, behind torchrun or srun if one started this."""
    # A key that the command adds (`+key=…`) or removes (`~key`) can be set only by `++key=…`.
    special = {key_of(text) for text in request.overrides if text.startswith(("+", "~"))}
    new = []
    for key, value in tuned.items():
        prefix = "++" if key in special else ""
        new.append(f"{prefix}{key}={value}")
    overrides = tuple(merge_overrides(request.overrides, new))

    by_starter = commands(replace(request, overrides=overrides), topology, own_keys=Tune.sections)
    starter = "framework"
    if request.external_ranks is not None and request.external_ranks.cluster.starter in by_starter:
        starter = request.external_ranks.cluster.starter
    return shlex.join(by_starter[starter])
