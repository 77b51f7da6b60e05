"""`job=train`: train, evaluate and save checkpoints. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from framework.command.job import Job
from framework.command.messages import training_summary
from framework.command.request import Request
from framework.config.checks import validation_mistakes
from framework.config.schema import Config
from framework.system.run_dir import RunDir

if TYPE_CHECKING:
    from framework.launch.plan import MonitorLink, RankArguments


class Train(Job):
    """Train, or resume a run, on any number of processes."""

    trains = True
    forecast = "framework.jobs.plan.forecast:forecast_memory"
    forecast_step = "framework.jobs.plan.estimate:estimate"

    def mistakes(self, config: Config) -> Iterator[str]:
        return validation_mistakes(config)

    def title(self, config: Config) -> str:
        return "Training" if config.resume is None else "Resuming"

    def rank(self, arguments: RankArguments, link: MonitorLink) -> int | None:
        """Train on one rank; with `preflight=true` check devices and links first."""
        from framework.engine.train import run_rank
        from framework.jobs.preflight.rank import before_training

        return run_rank(arguments, link, before_training=before_training)

    def text(self, request: Request, run_dir: RunDir, *, status: int) -> str:
        return training_summary(request.config, run_dir, status)
