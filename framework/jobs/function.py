"""`job=package.module.function`: a user's function with the model, trained if there is a checkpoint. No torch here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from framework.command.job import Job
from framework.command.request import Request
from framework.config.schema import Config
from framework.system.run_dir import RunDir

if TYPE_CHECKING:
    from framework.launch.plan import MonitorLink, RankArguments


class Function(Job):
    """Call the function that `job` names on every rank, with the weights of `checkpoint.path` if that is set."""

    takes_weights = True

    def title(self, config: Config) -> str:
        return f"Calling {config.job} with"

    def rank(self, arguments: RankArguments, link: MonitorLink) -> None:
        from framework.jobs.inference import call_rank

        call_rank(arguments, link)

    def text(self, request: Request, run_dir: RunDir, *, status: int) -> str:
        results = f"{request.config.job} has returned" if status == 0 else ""
        return self.closing(request.config, run_dir, results=results)
