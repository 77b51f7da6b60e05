"""`job=train`: train, evaluate and save checkpoints. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from framework.checkpoint import find
from framework.checkpoint.layout import step_of
from framework.command.job import Job
from framework.command.messages import training_summary
from framework.command.request import Request
from framework.config.checks import validation_mistakes
from framework.config.find_run import run_of
from framework.config.mistakes import raise_mistakes
from framework.config.overrides import path_argument
from framework.config.schema import Config
from framework.config.written import load_written_config
from framework.data.skipping import late_changes
from framework.errors import CheckpointError, ConfigError
from framework.runs.segments import rolled_back_steps
from framework.system.formatting import display_path
from framework.system.run_dir import RunDir, read_object

if TYPE_CHECKING:
    from framework.launch.plan import MonitorLink, RankArguments


class Train(Job):
    """Train, or resume a run, on any number of processes."""

    trains = True
    forecast = "framework.jobs.plan.forecast:forecast_memory"
    forecast_step = "framework.jobs.plan.estimate:estimate"

    def mistakes(self, config: Config) -> Iterator[str]:
        return validation_mistakes(config)

    def check(self, request: Request) -> None:
        super().check(request)
        if request.config.resume is not None:
            raise_mistakes(list(_late_skips(request.config, Path(request.config.resume))))

    def title(self, config: Config) -> str:
        return "Training" if config.resume is None else "Resuming"

    def rank(self, arguments: RankArguments, link: MonitorLink) -> int | None:
        """Train on one rank; with `preflight=true` check devices and links first."""
        from framework.engine.train import run_rank
        from framework.jobs.preflight.rank import before_training

        return run_rank(arguments, link, before_training=before_training)

    def text(self, request: Request, run_dir: RunDir, *, status: int) -> str:
        return training_summary(request.config, run_dir, status)


def _late_skips(config: Config, resumed: Path) -> Iterator[str]:
    """Yield which changes of `data.skip_steps` and `defer_steps` come too late: for steps that the run has passed.

    resumed: the run, or its checkpoint.
    """
    try:
        run_dir = run_of(resumed)
        checkpoint = find(resumed)
    except (ConfigError, CheckpointError):
        # A branch that is about to begin has no record yet. What is wrong with a checkpoint is said when it is loaded.
        return
    step = step_of(checkpoint.name) or 0
    before = load_written_config(run_dir)["data"]
    rolled_back = rolled_back_steps(read_object(run_dir.run_file) or {})
    for change in late_changes(before, config.data, step=step, rolled_back=rolled_back):
        again = f"job=branch {path_argument('run', display_path(run_dir.path))} step={change.last_step}"
        if change.last_step == 0:
            again = path_argument("rerun", display_path(run_dir.path))
        yield (
            f"data.{change.key}={change.now} (it was {change.before}): the run resumes after step {step:,}, so what it "
            f"trains on in step {change.number:,} can't change any more.\n"
            f"Make a new run that changes it: python -m framework {again} data.{change.key}={change.now}"
        )
