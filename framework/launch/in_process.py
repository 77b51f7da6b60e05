"""The launcher for debuggers: one rank, in the command's own process, as in any script."""

from __future__ import annotations

import pkgutil
import sys
import traceback
from bdb import BdbQuit
from typing import final

from framework.config.schema import Config
from framework.config.topology import Topology
from framework.errors import RequestError, RunError, TopologyError
from framework.launch.base import Launcher
from framework.launch.handshake import ExternalRanks
from framework.launch.plan import LaunchPlan, MonitorLink, Outcome, RankArguments
from framework.launch.stopping import interrupting
from framework.monitoring.rank_status import RankStatus
from framework.system.shown_text import shown


@final
class InProcessLauncher(Launcher):
    """Runs the only rank in the command's process."""

    name = "in_process"
    runs_in_command = True

    def topology(self, config: Config, *, external_ranks: ExternalRanks | None, is_planned: bool) -> Topology:
        topology = super().topology(config, external_ranks=external_ranks, is_planned=is_planned)
        if topology.world_size > 1:
            raise TopologyError(
                f"launcher=in_process runs one process, and {topology.world_size} are requested.\n"
                "Use launcher=local, or topology.procs_per_node=1."
            )
        return topology

    def launch(self, plan: LaunchPlan) -> Outcome:
        return run_in_this_process(plan)


def run_in_this_process(plan: LaunchPlan) -> Outcome:
    """Run the only rank in this process.

    Raises KeyboardInterrupt on Ctrl-C and on other stop signals that the rank can't handle at that moment, and what the
    rank raises, with three exceptions: SystemExit becomes RunError, because the run isn't finished; quitting the
    debugger becomes KeyboardInterrupt; a RequestError after the first step is printed here, so that the run directory
    is kept.
    """
    arguments = RankArguments(str(plan.run_dir.path), plan.topology, rank=0, rendezvous=None)
    rank_status = RankStatus()
    try:
        with interrupting():
            status = pkgutil.resolve_name(plan.entry)(arguments, MonitorLink(rank_status))
    except BdbQuit:
        raise KeyboardInterrupt from None
    except RequestError as error:
        if rank_status.read().step == 0:
            raise
        print(shown(str(error)), file=sys.stderr, flush=True)
        return Outcome(error.exit_status)
    except SystemExit as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise RunError(
            f"The run was left early: SystemExit({error.code!r}) was raised at {frame.filename}:{frame.lineno}.\n"
            "To end training early, return framework.Stop(reason) from a callback."
        ) from error
    finally:
        rank_status.close()
    return Outcome(status=status or 0)
