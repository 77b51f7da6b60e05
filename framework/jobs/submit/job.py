"""`job=submit`: write the job that a cluster needs for this command, and submit it. No torch here.

What is checked is what `job=plan` checks, and what the ranks would refuse after they have waited for their machines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from framework.command.job import Job
from framework.command.launcher import place, placement_mistakes
from framework.command.request import JobResult, Request
from framework.command.words import is_of_submission
from framework.config.checks import validation_mistakes
from framework.config.find_run import is_run
from framework.config.mistakes import raise_mistakes
from framework.config.overrides import key_of
from framework.config.schema import Config
from framework.config.secrets import masked_override
from framework.config.topology import Topology
from framework.errors import ConfigError
from framework.jobs.plan.job import make_plan
from framework.jobs.submit.engine import Engine, Submission
from framework.jobs.submit.skypilot import SkyPilot
from framework.jobs.submit.slurm import Slurm
from framework.jobs.submit.trainjob import TrainJob
from framework.system.output import answer
from framework.system.shown_text import shown

ENGINES: Mapping[str, type[Engine]] = {"slurm": Slurm, "trainjob": TrainJob, "skypilot": SkyPilot}

# What the cluster decides.
_PLACES = ("topology.node_rank", "topology.rdzv_endpoint")


class Submit(Job):
    """Submit a training, or the workers of a sweep."""

    needs_ranks = False
    # A sweep is begun by the command itself, which then submits its workers; see `framework.command.sweep`.
    sweepable = False
    trains = True
    sections = ("submit",)

    def mistakes(self, config: Config) -> Iterator[str]:
        yield from validation_mistakes(config)
        if config.submit.format is None:
            yield f"job=submit needs submit.format, one of {', '.join(ENGINES)}."
        if config.trainer.gpus is None:
            yield (
                "trainer.gpus=auto would count the GPUs of this machine, which isn't one of the job's. Type "
                "trainer.gpus=N, the GPUs of each node, or trainer.gpus=0 for the CPU."
            )
        if config.topology.rdzv_endpoint is not None or config.topology.node_rank != 0:
            yield f"job=submit can't go with {' and '.join(_PLACES)}, which the cluster decides. Leave them out."
        if config.resume is not None and not is_run(Path(config.resume)):
            yield (
                f"resume={config.resume} is one checkpoint, from which every restart of the job would begin again. "
                "Name its run."
            )

    def check(self, request: Request) -> None:
        """Raise FrameworkError for what `job=plan` refuses, what the engine can't express, and a program that lacks."""
        config = request.config
        if request.external_ranks is not None:
            raise ConfigError("job=submit is for one process, and this is one of several. Type the command once.")
        placement = place(config, is_planned=True)
        engine = _engine(request)
        if not config.submit.dry_run:
            engine.find_program()
        mistakes = placement_mistakes(config, placement, trains=True)
        mistakes += _secret_mistakes(engine.submission.words)
        mistakes += engine.mistakes()
        raise_mistakes(mistakes)
        # Builds the model and looks at the data, as each rank would.
        make_plan(request, placement)

    def run(self, request: Request) -> JobResult:
        """Submit the job, or print it with `submit.dry_run`. Raises FrameworkError for what can't be met."""
        self.check(request)
        settings = request.config.submit
        engine = _engine(request)
        text = engine.text()
        name = None
        if not settings.dry_run:
            name = engine.submit(text)
            print(shown(f"Submitted {request.config.recipe}: {engine.kind} {name}"), flush=True)
        elif not self.answers_json(request):
            answer(text.removesuffix("\n"))
        return JobResult(0, results={"format": settings.format, "job": name, "file": text})


def _engine(request: Request) -> Engine:
    name = request.config.submit.format
    assert name is not None, "its mistakes were checked"
    topology = place(request.config, is_planned=True).topology
    return ENGINES[name](_submission(request, topology))


def _submission(request: Request, topology: Topology) -> Submission:
    """Return what the request submits."""
    config = request.config
    assert config.submit.format is not None
    words = []
    for word in request.arguments:
        if not is_of_submission(word):
            words.append(word)
    is_worker = any(key_of(word) == "sweep.worker" for word in words)
    if is_worker:
        # All trials that run at a time.
        gpus = topology.gpus_per_node * (config.sweep.jobs or 1)
        topology = replace(topology, gpus_per_node=gpus)
    is_continued = is_worker or any(key_of(word) == "resume" for word in words)
    outputs = None
    if not is_continued:
        # As it is typed: a URL stays one.
        outputs = str(request.raw["path"]["outputs"])
        words = [word for word in words if key_of(word) != "path.outputs"]
    return Submission(
        config=config,
        topology=topology,
        is_worker=is_worker,
        words=tuple(words),
        outputs=outputs,
        options=getattr(config.submit, config.submit.format),
    )


def _secret_mistakes(words: Sequence[str]) -> list[str]:
    """Return a mistake for each password or token, which everybody who may look at the job could read."""
    mistakes = []
    for word in words:
        masked = masked_override(word)
        if masked != word:
            mistakes.append(
                f"{masked} would be readable in the job that is submitted. Put the value into an environment variable "
                f"of the job, and type {key_of(word)}=\\${{oc.env:NAME}}"
            )
    return mistakes
