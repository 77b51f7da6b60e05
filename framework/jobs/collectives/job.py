"""`job=collectives`: show what ranks exchange, with the tensors before and after. No torch here.

The ranks start as for training, on all nodes and by any launcher; nothing is trained. The exchanges and the page that
shows them are in `framework/jobs/collectives/demo.py`; it is printed, and written to the run directory.
"""

from __future__ import annotations

from framework.command.launcher import Placement
from framework.command.request import JobResult, Request
from framework.command.run_ranks import run
from framework.config.schema import Config
from framework.errors import ConfigError
from framework.system.formatting import display_path, format_facts
from framework.system.run_dir import RunDir

_ENTRY = "framework.jobs.collectives.demo:collectives_rank"
PAGE = "collectives.txt"  # in the run directory


def main(request: Request) -> JobResult:
    """Run and print the exchanges on any number of processes. Raises FrameworkError if the request can't be met."""
    check(request)
    return run(request, entry=_ENTRY, title="Collectives of", summary=_closing)


def check(request: Request) -> Placement:
    """Return the placement. Raises FrameworkError for any mistake that can be found before anything starts."""
    topology = request.placement.topology
    has_own_gpus = topology.gpus_per_node > 0 and not topology.shares_gpus
    if "nccl" in (request.config.collectives.backends or ()) and not has_own_gpus:
        raise ConfigError(
            "collectives.backends names nccl, which needs a GPU for each process, and these processes "
            f"{'share theirs' if topology.shares_gpus else 'have none'}.\nUse collectives.backends=[gloo]."
        )
    return request.placement


def _closing(_config: Config, run_dir: RunDir, status: int) -> str:
    path = display_path(run_dir.path)
    if status != 0:
        return format_facts([("logs", f"{path}/logs")])
    return f"\n{(run_dir.path / PAGE).read_text()}\n\n  {path}/{PAGE}"
