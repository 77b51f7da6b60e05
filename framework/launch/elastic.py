"""The launcher for several nodes and for restarts.

The command is typed on every node, which has what the `local` launcher has: a parent that monitors, and a fork server.
Node 0's parent hosts the store at topology.rdzv_endpoint, so the store outlives the ranks. The others compare what they
were started with, and receive what to run; see `rendezvous`.

After a failure the ranks of all nodes are ended, the nodes meet again, and a new attempt resumes from the run's last
checkpoint, at most launcher.max_restarts times in the whole run. A run on one node needs only `local`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar, final

from framework.config.schema import Config
from framework.config.topology import Topology
from framework.distributed.store import StoreGoneError, call_in_thread, call_with_deadline
from framework.errors import EXIT_RUN_FAILED, ConfigError, FrameworkError, LaunchError
from framework.launch.base import Launcher, Part
from framework.launch.child import silence_compiled_code
from framework.launch.external_ranks import ExternalRanks
from framework.launch.fingerprint import Fingerprint, fingerprint
from framework.launch.local import NodeRun, launch_on_this_node, node_run
from framework.launch.meeting_point import MeetingPoint
from framework.launch.plan import LaunchPlan, NodeSetup, Outcome
from framework.launch.rendezvous import Rendezvous
from framework.launch.run_spec import RunSpec
from framework.monitoring.report import FailureReport

T = TypeVar("T")
# A call that takes so much longer than it should has lost the link to the store.
_MARGIN_S = 30.0


@final
class ElasticLauncher(Launcher):
    """Starts the ranks of this node of several, and restarts all of them after a failure."""

    name = "elastic"
    spans_nodes = True
    restarts = True

    def topology(self, config: Config, *, external_ranks: ExternalRanks | None, is_planned: bool) -> Topology:
        nnodes = config.topology.nnodes
        if nnodes > 1 and config.topology.rdzv_endpoint is None and not is_planned:
            raise ConfigError(
                f"topology.nnodes={nnodes} needs topology.rdzv_endpoint=HOST:PORT: the name or address of node 0 and a "
                "free port on it, such as 29400, the same on every node."
            )
        return super().topology(config, external_ranks=external_ranks, is_planned=is_planned)

    @contextmanager
    def join(self, setup: NodeSetup) -> Iterator[Part]:
        if setup.endpoint is None:
            yield Part(self.launch)
            return
        with joined_nodes(setup, arguments=setup.arguments) as node:
            yield Part(node.run, node.spec)

    def launch(self, plan: LaunchPlan) -> Outcome:
        """Start the ranks of a run on one node."""
        return launch_on_this_node(plan)


@contextmanager
def joined_nodes(setup: NodeSetup, *, arguments: Sequence[str]) -> Iterator[ElasticNode]:
    """Yield this node's part of a run on several nodes, once every node has joined with the same command.

    Args:
        arguments: Those of the command.

    Raises ConfigError if a node differs, RunError if one doesn't join in time; then nothing was started.
    """
    own = fingerprint(arguments, working_dir=Path.cwd())
    topology = setup.topology
    # By default these follow from each node's own GPUs.
    own["processes on a node"] = f"{topology.procs_per_node} with {topology.gpus_per_node} GPUs"
    with node_run(setup) as run:
        node = ElasticNode(run, own)
        try:
            node.join()
            yield node
        except FrameworkError as error:
            node.status = error.exit_status
            raise
        finally:
            node.close()


@final
class ElasticNode:
    """One node of several."""

    def __init__(self, run: NodeRun, own: Fingerprint) -> None:
        self._run = run
        setup = run.setup
        self._setup = setup
        assert setup.endpoint is not None
        host, port = setup.endpoint
        self._address = f"topology.rdzv_endpoint={host}:{port}"
        point = MeetingPoint(
            endpoint=setup.endpoint,
            kind="node",
            address=self._address,
            port_option="topology.rdzv_endpoint",
        )
        self._rendezvous = Rendezvous(own, point, index=setup.node, count=setup.topology.nnodes)
        # This process is a client of the store, which may be lost.
        silence_compiled_code()
        # The exit status that `close` tells the other nodes.
        self.status = EXIT_RUN_FAILED
        # What to run, once node 0 has sent it; None on node 0.
        self.spec: RunSpec | None = None

    def join(self) -> None:
        """Wait for all nodes; see `joined_nodes`."""
        rendezvous = self._rendezvous
        node = self._setup.node
        nnodes = self._setup.topology.nnodes
        limit_s = self._setup.limits.init_timeout_s
        others = f"{nnodes - 1} more of {nnodes} nodes" if node == 0 else "node 0"
        self._run.print(f"Waiting for {others} at {self._address}")
        self._run.store = self._wait(lambda: rendezvous.open(timeout_s=limit_s), timeout_s=limit_s)
        if node == 0:
            self._wait(lambda: rendezvous.compare(timeout_s=limit_s), timeout_s=limit_s)
            return
        # Node 0 waits for all nodes for the time-out, which may begin after this node has come.
        answer = self._wait(lambda: rendezvous.follow(timeout_s=2 * limit_s), timeout_s=2 * limit_s)
        if isinstance(answer, int):
            raise rendezvous.refusal(answer)
        self.spec = answer

    def run(self, plan: LaunchPlan) -> Outcome:
        """Run this node's ranks, attempt after attempt, until they succeed or aren't to be restarted.

        Raises RunError if nodes don't meet again, LaunchError if processes or the store are lost, KeyboardInterrupt if
        the run is ended at once.
        """
        if self._setup.node == 0:
            self._rendezvous.send(plan.spec())
        outcome = self._run.run(plan, next_attempt=partial(self._meet, plan), others_done=self._others_are_done)
        self.status = outcome.status
        if outcome.failure is not None:
            self._keep_as_last(plan, outcome.failure)
        return outcome

    def close(self) -> None:
        """Leave the run. Node 0 waits for the others to do so, unless they are out of reach."""
        if not self._run.is_cut:
            self._wait(lambda: self._rendezvous.close(self.status), timeout_s=self._setup.limits.init_timeout_s)

    def _wait(self, call: Callable[[], T], *, timeout_s: float) -> T:
        """Make a call, which reports its own time-outs, and handle signals meanwhile. Raises LaunchError."""
        future = call_in_thread(call)
        if not self._run.wait_for(future.done, timeout_s=timeout_s + _MARGIN_S):
            raise self._lost_store()
        try:
            return future.result()
        except RuntimeError as error:
            # Torch's store raises DistError, a RuntimeError, if it is gone.
            raise self._lost_store() from error

    def _meet(self, plan: LaunchPlan, failed: FailureReport | None) -> int:
        """Wait for all nodes, and return the number of the attempt to start now."""
        limit_s = plan.limits.init_timeout_s
        if failed is not None:
            self._run.print(f"Waiting up to {limit_s:g} s for all nodes to meet again")
        meet = partial(self._rendezvous.meet, max_restarts=plan.max_restarts, timeout_s=limit_s)
        try:
            return self._wait(meet, timeout_s=limit_s)
        except FrameworkError:
            if failed is not None:
                self._keep_as_last(plan, failed)
            raise

    def _keep_as_last(self, plan: LaunchPlan, report: FailureReport) -> None:
        """Copy the report that this node has written to the name of a last one: no restart follows."""
        node = self._setup.node
        written = plan.run_dir.failure_of(node=node, attempt=report.attempt, is_last=False)
        last = plan.run_dir.failure_of(node=node, attempt=report.attempt, is_last=True)
        # Another node may have written the report, under its own name, or the disk is full.
        with suppress(OSError):
            shutil.copyfile(written, last)

    def _others_are_done(self) -> bool:
        """Tell the other nodes that this node's ranks have succeeded; return True if those of all nodes have."""
        try:
            return call_with_deadline(self._rendezvous.all_done)
        except StoreGoneError as error:
            raise self._lost_store() from error

    def _lost_store(self) -> LaunchError:
        return LaunchError(
            f"Node {self._setup.node} has lost the run's store at {self._address}: node 0 has ended, or can't be "
            "reached.\nLook at what node 0 printed."
        )
