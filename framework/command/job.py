"""What a job is: one class, whose methods run in the command's process and in each rank.

The framework's jobs are registered in `framework.config.jobs`. A user's class is named by `job=package.module.MyJob`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from framework.command.launcher import placement_mistakes
from framework.command.request import JobResult, Request
from framework.command.run_ranks import run_ranks
from framework.config.checks import rule_mistakes, source_mistakes
from framework.config.jobs import FUNCTION, JOBS, is_class_name
from framework.config.mistakes import raise_mistakes
from framework.config.schema import Config
from framework.config.targets import import_target
from framework.errors import ConfigError, RequestError, TargetError
from framework.remote.place import check_protocol, is_url, outputs_folder
from framework.system.formatting import display_path, format_facts
from framework.system.run_dir import RunDir

if TYPE_CHECKING:
    from framework.engine.setup import RankSetup
    from framework.launch.plan import MonitorLink, RankArguments


class Job:
    """What the command does. A job of your own overrides `work` and, to print something else, `text`:

        class LargestWeight(Job):
            needs_weights = True

            def work(self, setup, model):
                return {"largest": max(float(weight.abs().max()) for weight in model.parameters())}

    The command calls `mistakes`, `check`, `run` and `text` in its own process, where torch isn't imported: import it
    inside of `work` and `rank`, or at the top of another module. These two run in every rank, on another instance.
    """

    # False: the job starts no ranks and has no run directory. It overrides `run`.
    needs_ranks: ClassVar[bool] = True
    # True: it needs `checkpoint.path`, and `work` gets the model with these weights.
    needs_weights: ClassVar[bool] = False
    # True: it works on a model with the weights of `checkpoint.path`, or as it is built if there is none.
    takes_weights: ClassVar[bool] = False
    # True: it needs `runs=[RUN,…]`, the runs that it reads.
    needs_runs: ClassVar[bool] = False
    # True: it looks into the run of `run=RUN`, with the configuration in force at `step`.
    takes_run: ClassVar[bool] = False
    # True: the configuration of `run=RUN` is the one in force after `step`, not at it.
    continues_run: ClassVar[bool] = False
    # False: it is about one run, so it can't be part of a sweep (-m).
    sweepable: ClassVar[bool] = True
    # True: it makes training runs, which can be resumed and rerun, and lie directly in the recipe's folder.
    trains: ClassVar[bool] = False
    # "module:function" that forecasts the memory, for the report of a rank that ran out of it.
    forecast: ClassVar[str | None] = None
    # "module:function" that forecasts a step, for the summary of a training with the profiler.
    forecast_step: ClassVar[str | None] = None
    # The configuration's sections that only this job reads.
    sections: ClassVar[tuple[str, ...]] = ()

    # In the command's process

    def mistakes(self, config: Config) -> Iterator[str]:
        """Yield what is wrong between the keys of `config` for this job; all mistakes are reported together."""
        return iter(())

    def check(self, request: Request) -> None:
        """Raise FrameworkError for what can't be met on this machine. In a sweep, before the first run starts."""
        if self.needs_ranks:
            raise_mistakes(placement_mistakes(request.config, request.placement, trains=self.trains))

    def run(self, request: Request) -> JobResult:
        """Do the job and return how it ended: by default, `rank` in every rank, then print `text`.

        Raises FrameworkError for a request that can't be met, KeyboardInterrupt on Ctrl-C.
        """
        self.check(request)
        return run_ranks(
            request,
            entry=self.entry(),
            title=self.title(request.config),
            prepare=lambda run_dir: self.prepare(request, run_dir),
            text=lambda run_dir, status: self.text(request, run_dir, status=status),
            trains=self.trains,
            forecast=self.forecast,
            forecast_step=self.forecast_step,
        )

    def title(self, config: Config) -> str:
        """Return how the first line begins, as `Training` in `Training digits: 2 processes, CPU`."""
        return f"Running {config.job} on"

    def prepare(self, request: Request, run_dir: RunDir) -> None:
        """Called before the ranks start, once they have a run directory."""

    def text(self, request: Request, run_dir: RunDir, *, status: int) -> str:
        """Return what is printed at the end: by default, what `work` returned and where the files are.

        status: the exit status; 0 if the job finished.
        """
        results = ""
        if status == 0:
            facts = [(name, str(value)) for name, value in run_dir.read_run().get("results", {}).items()]
            results = format_facts(facts)
        return self.closing(request.config, run_dir, results=results)

    def closing(self, config: Config, run_dir: RunDir, *, results: str) -> str:
        """Return `results`, if any, then the checkpoint that was used, the run directory and its logs."""
        path = display_path(run_dir.path)
        facts = [("run", path), ("logs", f"{path}/logs")]
        if config.checkpoint.path is not None:
            facts.insert(0, ("checkpoint", display_path(Path(str(config.checkpoint.path)))))
        lines = [""]
        if results:
            lines.append(results)
        lines.append(format_facts(facts))
        return "\n".join(lines)

    def answers_json(self, request: Request) -> bool:
        """Return True if the answer is one JSON document, `document`, and not text: by default, with `format=json`."""
        return request.as_json

    def document(self, request: Request, result: JobResult) -> Any:
        """Return what `format=json` prints: by default, the run's facts and `results` in its record."""
        from framework.command.document import document_of

        return document_of(request, result)

    # In each rank

    def rank(self, arguments: RankArguments, link: MonitorLink) -> int | None:
        """Do this rank's part and return its exit status, None for 0: by default, join the process group and `work`."""
        from framework.engine.setup import setup_rank
        from framework.engine.work import joined

        with setup_rank(arguments, link) as setup, joined(setup, arguments, with_model=self.needs_weights) as model:
            results = self.work(setup, model)
            if results is not None and setup.context.is_main:
                setup.run_dir.update_run({"results": dict(results)})
        return None

    def work(self, setup: RankSetup, model: Any) -> Mapping[str, Any] | None:
        """Do the work of one rank, inside the process group. Every rank runs it.

        Args:
            setup: `setup.config`, `setup.context` (rank, world_size, device, is_main) and `setup.run_dir`.
            model: with the weights of `checkpoint.path`, in evaluation mode; None unless the job `needs_weights`.

        Returns:
            On rank 0, plain values for `results` in run.json; or None.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method work(setup, model).")

    @classmethod
    def entry(cls) -> str:
        """Return the name by which each rank finds this class."""
        return f"{cls.__module__}:{cls.__qualname__}.run_rank"

    @classmethod
    def run_rank(cls, arguments: RankArguments, link: MonitorLink) -> int | None:
        """Do one rank's part, in that rank's process."""
        return cls().rank(arguments, link)


def load_job(name: str) -> Job:
    """Return the job that `job=NAME` names. Raises TargetError for a class of the user's that isn't one."""
    if not is_class_name(name):
        path = JOBS.get(name, FUNCTION).path
        job: Job = pkgutil.resolve_name(path)()
        return job

    try:
        job_class = import_target(name)
    except TargetError as error:
        raise TargetError(f"job={name}: {error}") from error
    if not isinstance(job_class, type) or not issubclass(job_class, Job):
        raise TargetError(
            f"job={name}: it isn't a subclass of framework.Job. The name of a function begins with a small letter."
        )
    return job_class()


def load_swept_job(name: str) -> Job:
    """Return the job of a sweep's trials. Raises ConfigError for one that answers for one run."""
    job = load_job(name)
    if not job.sweepable:
        raise ConfigError(f"job={name} can't go with a sweep (-m), whose jobs are about one trial each. Leave -m out.")
    return job


def check_request(request: Request) -> None:
    """Raise ConfigError with all mistakes that the configuration of a request shows.

    Those of the processes are among them if there are others; alone, `Job.check` reports them.
    """
    config = request.config
    job = load_job(config.job)
    mistakes = [*rule_mistakes(config), *_mistakes(job, config)]
    # What is wrong with these sections decides what the processes are.
    is_placed = not any(mistake.startswith(("launcher", "topology", "strategy")) for mistake in mistakes)
    if mistakes and job.needs_ranks and is_placed:
        try:
            mistakes += placement_mistakes(config, request.placement, trains=job.trains)
        except RequestError as error:
            mistakes.append(str(error))
    raise_mistakes(mistakes)


def _mistakes(job: Job, config: Config) -> Iterator[str]:
    """Yield what is wrong between the keys that every job knows, then the job's own `mistakes`."""
    if config.args and config.job in JOBS:
        yield f"args.{next(iter(config.args))} is for a function of yours (job=package.module.function). Leave it out."
    yield from _place_mistakes(config)
    yield from _weights_mistakes(job, config)
    yield from _start_mistakes(job, config)
    yield from _run_mistakes(job, config)
    yield from _runs_mistakes(job, config)
    yield from job.mistakes(config)
    # Jobs on runs build nothing.
    if "runs" not in job.sections:
        yield from source_mistakes(config)


def _place_mistakes(config: Config) -> Iterator[str]:
    """Yield what is wrong with a URL as `path.outputs`."""
    if not is_url(config.path.outputs):
        return
    try:
        outputs_folder(config.path)
        check_protocol(config.path.outputs)
    except ConfigError as error:
        yield f"path.outputs={error}"


def _weights_mistakes(job: Job, config: Config) -> Iterator[str]:
    path = config.checkpoint.path
    if job.needs_weights and path is None:
        yield f"job={config.job} needs weights: checkpoint.path=outputs/RECIPE/RUN, or one of its checkpoints."
    if path is not None and not (job.needs_weights or job.takes_weights):
        names = [name for name in JOBS if load_job(name).needs_weights]
        yield (
            f"checkpoint.path={path} is for job={', '.join(names)} and your functions. To train, use resume=RUN to "
            f"continue a run, or init_from={path} to start from its weights."
        )


def _start_mistakes(job: Job, config: Config) -> Iterator[str]:
    """Yield what is wrong with `resume` and `rerun`."""
    resume = config.resume
    if resume is not None and not job.trains:
        key = "checkpoint.path" if job.needs_weights else "init_from"
        yield f"resume can't go with job={config.job}: it continues a training run. Use {key}={resume} for its weights."
    if resume is not None and config.trainer.fast_dev_run:
        yield "trainer.fast_dev_run can't go with resume: it writes no checkpoints. Use trainer.max_steps."
    if config.rerun is not None and not job.trains:
        yield f"rerun can't go with job={config.job}: it trains again. Leave one of them out."


def _run_mistakes(job: Job, config: Config) -> Iterator[str]:
    """Yield what is wrong with `run`, `step`, `rank` and `skip`."""
    for key in ("run", "step", "rank"):
        value = getattr(config, key)
        if value is not None and not job.takes_run:
            names = [name for name in JOBS if load_job(name).takes_run]
            yield f"{key}={value} is for job={', '.join(names)}. Leave it out."
    if config.skip and "branch" not in job.sections:
        yield f"skip={config.skip[0]} is for job=branch. Leave it out, or type data.skip_steps=[{config.skip[0]}]."


def _runs_mistakes(job: Job, config: Config) -> Iterator[str]:
    paths = config.runs.paths
    reads_runs = "runs" in job.sections
    if paths is not None and not reads_runs:
        *names, last = [name for name in JOBS if "runs" in load_job(name).sections]
        yield f"runs={paths[0]} is for job={', '.join(names)} and {last}. Leave it out."
    if paths is None and job.needs_runs:
        yield (
            f"job={config.job} needs runs: runs=[outputs/RECIPE/RUN,…], or a folder of runs. "
            "job=runs lists what there is."
        )
