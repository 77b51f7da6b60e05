"""`job=collectives`: show what ranks exchange, with the tensors before and after. No torch here.

The ranks start as for training, on all nodes and by any launcher; nothing is trained. The exchanges and the page that
shows them are in `framework/jobs/collectives/demo.py`; it is printed, and written to the run directory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from framework.command.job import Job
from framework.command.request import Request
from framework.config.schema import Config
from framework.errors import ConfigError
from framework.system.formatting import display_path, format_facts
from framework.system.run_dir import RunDir

if TYPE_CHECKING:
    from framework.launch.plan import MonitorLink, RankArguments

PAGE = "collectives.txt"  # in the run directory, as in `demo`


class Collectives(Job):
    """Run and print the exchanges on any number of processes."""

    def mistakes(self, config: Config) -> Iterator[str]:
        for name in config.collectives.backends or ():
            if name not in ("gloo", "nccl"):
                yield f"collectives.backends=[{name}]: must be gloo, nccl, or both."

    def check(self, request: Request) -> None:
        topology = request.placement.topology
        has_own_gpus = topology.gpus_per_node > 0 and not topology.shares_gpus
        if "nccl" in (request.config.collectives.backends or ()) and not has_own_gpus:
            raise ConfigError(
                "collectives.backends names nccl, which needs a GPU for each process, and these processes "
                f"{'share theirs' if topology.shares_gpus else 'have none'}.\nUse collectives.backends=[gloo]."
            )

    def title(self, config: Config) -> str:
        return "Collectives of"

    def rank(self, arguments: RankArguments, link: MonitorLink) -> None:
        from framework.jobs.collectives.demo import collectives_rank

        collectives_rank(arguments, link)

    def text(self, request: Request, run_dir: RunDir, *, status: int) -> str:
        path = display_path(run_dir.path)
        if status != 0:
            return format_facts([("logs", f"{path}/logs")])
        return f"\n{(run_dir.path / PAGE).read_text()}\n\n  {path}/{PAGE}"
