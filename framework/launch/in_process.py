"""The launcher for debuggers: one rank, in the command's own process, as in any script."""

from __future__ import annotations

import os
import pkgutil
import socket
import traceback
from bdb import BdbQuit
from contextlib import closing
from typing import final

from framework.config.schema import Config
from framework.config.topology import Topology
from framework.errors import RequestError, RunError, StoppedBySignalError, TopologyError
from framework.launch.base import Launcher
from framework.launch.error_record import file_failure, record_of
from framework.launch.external_ranks import ExternalRanks
from framework.launch.plan import LaunchPlan, MonitorLink, Outcome, RankArguments
from framework.monitoring.failure import RankFailure, failure_facts
from framework.monitoring.rank_status import RankPhase, RankStatus, StatusPage
from framework.monitoring.report import FailureReport
from framework.system.signals import interrupting


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

    The outcome of a failure has what was raised. SystemExit becomes RunError, because the run isn't finished. Raises
    RequestError before the first step, and KeyboardInterrupt on Ctrl-C, on other stop signals that the rank can't
    handle at that moment, and if the debugger is quit.
    """
    arguments = RankArguments(
        str(plan.run_dir.path), plan.topology, rank=0, rendezvous=None, skips_test=plan.skips_test
    )
    with closing(RankStatus()) as rank_status:
        try:
            with interrupting():
                status = pkgutil.resolve_name(plan.entry)(arguments, MonitorLink(rank_status))
        except BdbQuit:
            raise KeyboardInterrupt from None
        except StoppedBySignalError:
            if plan.is_resumable:
                raise
            raise KeyboardInterrupt from None
        except SystemExit as error:
            return _failed(_left_early(error), plan, page=rank_status.read())
        except Exception as error:
            page = rank_status.read()
            if isinstance(error, RequestError) and page.step == 0:
                raise
            return _failed(error, plan, page=page)
    return Outcome(status=status or 0)


def _left_early(error: SystemExit) -> RunError:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    failure = RunError(
        f"The run was left early: SystemExit({error.code!r}) was raised at {frame.filename}:{frame.lineno}.\n"
        "To end training early, return framework.Stop(reason) from a callback."
    )
    failure.__cause__ = error
    return failure


def _failed(error: Exception, plan: LaunchPlan, *, page: StatusPage) -> Outcome:
    """Return the outcome of a rank that raised an exception. page: where it was."""
    error = file_failure(error, rank=0, run_dir=plan.run_dir.path) or error
    facts = failure_facts(record_of(error), None)
    assert facts is not None
    failure = RankFailure(
        rank=0,
        node=plan.node,
        log=str(plan.run_dir.rank_log(0)),
        host=socket.gethostname(),
        pid=os.getpid(),
        devices=plan.topology.devices_label(0),
        phase=RankPhase(page.phase).label,
        step=page.step,
        **facts,
    )
    report = FailureReport(world_size=1, first=failure, others=())
    return Outcome(failure.exit_status, failure=report, error=error)
