"""`job=package.module.function`: a user's function with the model, trained if there is a checkpoint. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from framework.command.job import Job
from framework.command.request import Request
from framework.config.schema import Config
from framework.config.targets import SourceSignatures, check_node
from framework.errors import TargetError
from framework.system.run_dir import RunDir

if TYPE_CHECKING:
    from framework.launch.plan import MonitorLink, RankArguments

# What `call_rank` passes to a function whose signature has it.
_OFFERED = ("config", "run_dir", "context")


class Function(Job):
    """Call the function that `job` names on every rank, with the weights of `checkpoint.path` if that is set."""

    takes_weights = True

    def title(self, config: Config) -> str:
        return f"Calling {config.job} with"

    def mistakes(self, config: Config) -> Iterator[str]:
        signatures = SourceSignatures()
        try:
            signatures.parameters(config.job)
        except TargetError as error:
            yield f"job={config.job}: {error}"
            return
        node = {"_target_": config.job, **config.args}
        yield from check_node(node, "args", positional=1, supplied=_OFFERED, signatures=signatures)

    def rank(self, arguments: RankArguments, link: MonitorLink) -> None:
        from framework.jobs.inference import call_rank

        call_rank(arguments, link)

    def text(self, request: Request, run_dir: RunDir, *, status: int) -> str:
        results = f"{request.config.job} has returned" if status == 0 else ""
        return self.closing(request.config, run_dir, results=results)
