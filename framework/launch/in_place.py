"""The launcher for debuggers: one rank, in this very process. Breakpoints, prints and tracebacks as in any script."""

from __future__ import annotations

import importlib
import sys
import traceback
from bdb import BdbQuit

from framework.errors import RequestError, RunError, TopologyError
from framework.launch.link import Link
from framework.launch.plan import LaunchPlan, Outcome, RankArguments
from framework.launch.stopping import interrupting
from framework.pulse import Pulse
from framework.topology import Topology


def check_one_process(topology: Topology) -> None:
    """Raise TopologyError for more than one rank."""
    if topology.world_size != 1:
        raise TopologyError(
            f"launcher=in_place runs one process, and {topology.world_size} are asked for.\n"
            "Use launcher=local, or topology.procs_per_node=1."
        )


def launch(plan: LaunchPlan) -> Outcome:
    """Run the only rank in this process.

    What it raises passes through, with three exceptions: SystemExit becomes RunError, because the run isn't finished;
    quitting the debugger becomes KeyboardInterrupt; a RequestError after the first step is printed here, so that the
    run directory is kept.

    Raises TopologyError for more than one rank, and KeyboardInterrupt on Ctrl-C and on any other stop signal that the
    rank can't handle at that moment.
    """
    check_one_process(plan.topology)
    module, _, name = plan.entry.partition(":")
    arguments = RankArguments(str(plan.run_dir.path), plan.topology, rank=0, rendezvous=None)
    pulse = Pulse()
    try:
        with interrupting():
            status = getattr(importlib.import_module(module), name)(arguments, Link(pulse))
    except BdbQuit:
        raise KeyboardInterrupt from None
    except RequestError as error:
        if pulse.step == 0:
            raise
        print(error, file=sys.stderr, flush=True)
        return Outcome(error.exit_status)
    except SystemExit as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise RunError(
            f"The run was left early: SystemExit({error.code!r}) was raised at {place.filename}:{place.lineno}.\n"
            "To end a training before its last step, raise framework.Stop in a callback."
        ) from error
    finally:
        pulse.close()
    return Outcome(status=status or 0)
