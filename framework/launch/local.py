"""The launcher of one node: ranks are forked from the fork server and monitored by this process, without torch.

The parent holds every rank's status memory, so it knows what a rank was doing after any death. No process of a run is
left behind: the server that forks the ranks ends all that they have started (`run_server`), and each process asks the
kernel to die with its parent (`system.signals`).

Read `launch_on_this_node`, then `NodeRun.run` and `_run_attempt`.
"""

from __future__ import annotations

import math
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TextIO, final

from framework.distributed.store import LOOPBACK, RunStore, listen
from framework.errors import EXIT_STOPPED, FrameworkError, LaunchError, StoppedBySignalError
from framework.launch.base import Launcher
from framework.launch.child import LEAVE_S, Child, Message
from framework.launch.fork_server import ForkServer, call_in_child, running_fork_server
from framework.launch.plan import LaunchPlan, NodeSetup, Outcome, RankArguments, RunProgress
from framework.launch.rank_environment import network_environment, rank_environment
from framework.launch.run_server import RunServer
from framework.launch.stopping import stopping_line
from framework.monitoring.failure import FailureKind
from framework.monitoring.node_exchange import NodeExchange
from framework.monitoring.node_monitor import NodeMonitor, RankInfo
from framework.monitoring.rank_status import RankStatus
from framework.monitoring.report import FailureReport, late_line, render, report_failure
from framework.system.orphans import ENDS_WITHIN_S, left_behind
from framework.system.output import ERASE_BELOW, SHOW_CURSOR
from framework.system.shown_text import shown
from framework.system.signals import Signals, catching_signals, shown_signal

if TYPE_CHECKING:
    from torch.distributed import Store

# Causes of an alarm after which every node ends at once, without a report. A stopped run is to be resumed.
INTERRUPTED = "interrupted"
STOPPED = "stopped"

# How much longer than backend.init_timeout the ranks may take to start.
_START_S = 10.0
# How long to wait after a first failure, so that the report has the ranks that fail with it.
_SETTLE_S = 0.5
# How long to wait for the exit of the rank whose connection was lost: with a GPU, exiting takes seconds.
_CAUSE_TIMEOUT_S = 3.0
# How long comparing the ranks' collectives may take.
_COMPARE_S = 20.0
_POLL_S = 0.2
_SUCCESSES = (0, EXIT_STOPPED)


@final
class LocalLauncher(Launcher):
    """Starts the ranks of one node."""

    name = "local"

    def launch(self, plan: LaunchPlan) -> Outcome:
        return launch_on_this_node(plan)


def launch_on_this_node(plan: LaunchPlan) -> Outcome:
    """Start every rank and wait for all of them; after a failure restart them `plan.max_restarts` times.

    Raises LaunchError if processes can't be started or are lost, KeyboardInterrupt if the run is ended at once: on
    Ctrl-C or another of `STOP_SIGNALS` if nothing would be saved, otherwise on a second Ctrl-C. No rank is left then.
    """

    def next_attempt(failed: FailureReport | None) -> int:
        if failed is None:
            return 0
        return failed.attempt + 1

    with node_run(plan) as node:
        return node.run(plan, next_attempt=next_attempt)


@contextmanager
def node_run(setup: NodeSetup) -> Iterator[NodeRun]:
    """Yield this node's part of a run, with nothing started yet; no process of it is left afterwards."""
    with (
        catching_signals() as signals,
        running_fork_server(setup.fork_server) as server,
        _rendezvous_folder(setup) as folder,
        closing(NodeRun(setup, server, folder=folder, signals=signals)) as run,
    ):
        yield run


@contextmanager
def _rendezvous_folder(setup: NodeSetup) -> Iterator[Path | None]:
    """Yield a folder for rendezvous files, with `backend.init_method=file`.

    It isn't in the run directory, whose name is the user's: torch cuts the path at `#` and `?`, and can't unquote it.
    """
    if setup.init_method != "file":
        yield None
        return
    with TemporaryDirectory(prefix="framework_") as folder:
        yield Path(folder)


@final
class NodeRun:
    """One node's ranks of a run, over all attempts, and the loop that monitors them. Call `close` in any case."""

    def __init__(self, setup: NodeSetup, server: ForkServer, *, folder: Path | None, signals: Signals) -> None:
        """Make the part of a run in which nothing is started yet.

        Args:
            folder: For rendezvous files, with `backend.init_method=file`.
        """
        self.setup = setup
        self._fork_server = server
        # The store of a run on several nodes.
        self.store: Store | None = None
        # Ranks that others waited for and that caught up.
        self._late: list[dict[str, Any]] = []
        self._folder = folder
        self._signals = signals
        # The signal by which the run was asked to stop; 0 for none.
        self._stop_signal = 0
        # What to do when one of these sources can be read.
        self._handlers: dict[Any, Callable[[], None]] = {signals: self._on_signals}

        # Of the present attempt:
        self._attempt = 0
        self._run_server: RunServer | None = None
        self._monitor = NodeMonitor(node=setup.node, limits=setup.limits)
        self._exchange: NodeExchange | None = None
        self._is_monitoring = False
        # The ranks of the processes that run, by the keys of the processes.
        self._running: dict[str, int] = {}
        # How the others ended, by rank: events of the run server, with `early` for one that left in the middle of its
        # work.
        self._exits: dict[int, Message] = {}
        # A failure that no exit of a local process shows, in a few words.
        self._trouble: str | None = None
        # What the ranks left behind, once everything has ended.
        self._left: list[str] | None = None

    def run(
        self,
        plan: LaunchPlan,
        *,
        next_attempt: Callable[[FailureReport | None], int],
        others_done: Callable[[], bool] = lambda: True,
    ) -> Outcome:
        """Run this node's ranks, attempt after attempt, until they succeed or aren't to be restarted.

        Args:
            next_attempt: given the last failure, returns the number of the attempt to start now.
            others_done: called once this node's ranks are done; returns True if those of the other nodes are, too.

        Raises KeyboardInterrupt if the run is to be ended at once.
        """
        failed = None
        while True:
            attempt = next_attempt(failed)
            if attempt > 0:
                self._record_restart(plan, attempt, failed)
            outcome = self._run_attempt(plan, attempt, others_done)
            failed = outcome.failure
            # A node that is cut off from node 0 can't come to the next attempt.
            is_cut_off = self.is_cut and self.setup.node > 0
            if failed is None or is_cut_off or not self._may_restart(failed):
                return replace(outcome, late=tuple(self._late))
            self.print(render(failed))

    def _run_attempt(self, plan: LaunchPlan, attempt: int, others_done: Callable[[], bool]) -> Outcome:
        """Start this node's ranks and wait for all of them; none is left on return."""
        self._begin(attempt)
        try:
            self._start_ranks(plan)
            self._await_start()
            self.wait_for(self._is_over)
            if self._all_succeeded():
                # Another node may fail in the meantime, and then this attempt has failed, too.
                self._wait_for_other_nodes(others_done)
            if not self._all_succeeded():
                return self._fail(plan)
            is_stopped = any(end["status"] == EXIT_STOPPED for end in self._exits.values())
            return Outcome(EXIT_STOPPED if is_stopped else 0)
        except KeyboardInterrupt as interrupt:
            # The other nodes' ranks would wait for those that were here.
            if self._exchange is not None and self._trouble not in (INTERRUPTED, STOPPED):
                is_stop = isinstance(interrupt, StoppedBySignalError)
                self._exchange.raise_alarm(STOPPED if is_stop else INTERRUPTED)
            raise
        finally:
            self._end_ranks()

    def _may_restart(self, failure: FailureReport | None = None) -> bool:
        """Return True if another attempt may follow; without a report, if one may follow a failure that isn't final."""
        if failure is not None and failure.first.is_final:
            return False
        return not self._monitor.stop_signal and self._attempt < self.setup.max_restarts

    @property
    def is_cut(self) -> bool:
        """True if the store, and with it the other nodes, was out of reach in the last attempt."""
        return self._exchange is not None and self._exchange.is_cut

    def _record_restart(self, plan: LaunchPlan, attempt: int, failed: FailureReport | None) -> None:
        """Print that this attempt begins; on node 0 add it to `run.json`."""
        cause = "a node was restarted" if failed is None else failure_in_short(failed)
        self.print(f"Restart {attempt} of {self.setup.max_restarts} after {cause}")
        if self.setup.node == 0:
            time_of_day = datetime.now(timezone.utc).isoformat(timespec="seconds")
            note = {"attempt": attempt, "cause": cause, "time": time_of_day}
            # If the disk is full, the ranks will fail with a better message.
            with suppress(OSError):
                earlier_notes = plan.run_dir.read_run().get("restarts", [])
                plan.run_dir.update_run({"restarts": [*earlier_notes, note]})

    def close(self) -> None:
        """Stop monitoring. Clear up the terminal: a rank that was killed may have left its live view."""
        if not self._all_succeeded():
            for stream in (sys.stdout, sys.stderr):
                _control(stream, f"\r{ERASE_BELOW}{SHOW_CURSOR}")
        self._monitor.close()

    def print(self, line: str) -> None:
        """Print to stderr, if the run has the terminal."""
        if self.setup.terminal:
            _control(sys.stderr, f"\r{ERASE_BELOW}")
            print(shown(line), file=sys.stderr, flush=True)

    def wait_for(self, condition: Callable[[], Any], *, timeout_s: float | None = None) -> bool:
        """Handle events and monitor the ranks until `condition()` holds. Return False on a time-out."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not condition():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            readable, _, _ = select.select(list(self._handlers), [], [], min(_POLL_S, left_s))
            for source in readable:
                self._handlers[source]()
            if self._is_monitoring:
                self._check_ranks()
        return True

    # Starting

    def _begin(self, attempt: int) -> None:
        """Forget the previous attempt."""
        self._monitor.close()
        self._attempt = attempt
        self._running = {}
        self._exits = {}
        self._trouble = None
        self._left = None
        self._monitor = NodeMonitor(node=self.setup.node, limits=self.setup.limits)
        self._is_monitoring = True
        if self.store is not None:
            run_store = RunStore(self.store, attempt=attempt)
            self._exchange = NodeExchange(run_store, self._monitor, nnodes=self.setup.topology.nnodes)

    def _start_ranks(self, plan: LaunchPlan) -> None:
        self._fork_server.load(plan.names)
        self._run_server = self._fork_server.fork()
        self._handlers[self._run_server] = self._on_event
        if plan.endpoint is not None:
            # The command of node 0 hosts the store.
            self._spawn_ranks(plan, *plan.endpoint)
            return
        # Rank 0 hosts the store. Its port is bound before the ranks get the number, so no other process can take it.
        with listen(LOOPBACK, 0) as listener:
            self._spawn_ranks(plan, *listener.getsockname(), listener=listener)

    def _spawn_ranks(self, plan: LaunchPlan, host: str, port: int, *, listener: socket.socket | None = None) -> None:
        """Have a process forked for each rank of this node, which meet at this host and port.

        Args:
            listener: The socket on which rank 0 hosts the store; None if this process or another node hosts it.
        """
        assert self._run_server is not None
        topology = plan.topology
        attempt = self._attempt
        rendezvous = self._rendezvous(plan, host, port)
        network = network_environment(host, nnodes=topology.nnodes)
        for local_rank in range(topology.procs_per_node):
            rank = topology.rank_of(plan.node, local_rank)
            # What the process is to do, and in which environment.
            arguments = RankArguments(
                str(plan.run_dir.path),
                topology,
                rank=rank,
                rendezvous=rendezvous,
                attempt=attempt,
                skips_test=plan.skips_test,
            )
            variables = rank_environment(topology, rank=rank, host=host, port=port, attempt=attempt)
            child = Child(
                "framework.launch.worker:rank_main",
                {"entry": plan.entry, "rank": arguments},
                environment={**network, **variables},
                log=plan.run_dir.rank_log(rank),
                terminal=plan.terminal and rank == 0,
            )

            # What the monitor watches.
            rank_status = RankStatus()
            info = RankInfo(rank, local_rank, topology.devices_label(local_rank), log=str(child.log))
            self._monitor.add(info, rank_status)
            self._running[child.key] = rank

            fds = [rank_status.fd]
            if listener is not None and rank == 0:
                fds.append(listener.fileno())
            self._run_server.spawn(child, fds=fds)

    def _rendezvous(self, plan: LaunchPlan, host: str, port: int) -> str:
        """Return the URL for `init_process_group`."""
        if plan.init_method == "env":
            return "env://"
        if plan.init_method == "tcp":
            return f"tcp://{host}:{port}"
        assert self._folder is not None
        # Each attempt needs a file of its own.
        file = self._folder / f"rendezvous_{self._attempt}"
        return f"file://{file}"

    def _await_start(self) -> None:
        """Raise LaunchError if a rank doesn't start in time: the fork server is still loading torch."""
        limit_s = self.setup.limits.init_timeout_s

        def have_started() -> bool:
            return self._is_over() or all(state.pid for state in self._monitor.states())

        if not self.wait_for(have_started, timeout_s=limit_s + _START_S):
            raise LaunchError(
                f"The ranks weren't started within backend.init_timeout={limit_s:g} s. "
                "Loading torch may be slow here; raise it."
            )

    # Monitoring

    def _check_ranks(self) -> None:
        """Print who is late, note who hangs, pass on requests to stop, exchange all that with the other nodes."""
        monitor = self._monitor
        exchange = self._exchange
        elsewhere = None
        self._look_at_received_signals()
        if exchange is not None:
            exchange.step()
            if exchange.alarm is not None:
                self._on_alarm(exchange.alarm)
            elsewhere = exchange.progress_elsewhere

        for event in monitor.check(elsewhere=elsewhere):
            if event["event"] == "hung":
                self._trouble = self._trouble or f"the ranks have waited for {event['seconds']:.0f} s"
            else:
                self.print(late_line(event))
            if event["event"] == "caught_up":
                self._late.append({key: event[key] for key in ("rank", "phase", "step", "seconds")})
        if self.setup.on_progress is not None and self.setup.node == 0:
            page = monitor.read(0)
            self.setup.on_progress(RunProgress(page.step, page.total_steps, page.validations, page.validated_value))

    def _on_alarm(self, alarm: Mapping[str, Any]) -> None:
        """End this node's attempt too: another node's has failed, or was interrupted."""
        node = alarm["node"]
        cause = alarm["cause"]
        if cause not in (INTERRUPTED, STOPPED):
            self._trouble = self._trouble or f"node {node}: {cause}"
        elif node != self.setup.node and self._trouble != cause:
            self._trouble = cause
            self.print(f"Node {node} was {cause}")
            if cause == STOPPED:
                raise StoppedBySignalError(f"node {node}")
            raise KeyboardInterrupt

    def _on_event(self) -> None:
        """Take an event of the run server: how a rank's process ended, or what was left behind."""
        assert self._run_server is not None
        event = self._run_server.next_event()
        if "left" in event:
            self._left = event["left"]
            return
        rank = self._running.pop(event["key"], None)
        if rank is None:
            return
        left_early = event["status"] in _SUCCESSES and not self._monitor.read(rank).is_done
        self._exits[rank] = {**event, "rank": rank, "early": left_early}

    def _on_signals(self) -> None:
        for signal_number in self._signals.take():
            self._on_signal(signal_number)

    def _on_signal(self, signal_number: int) -> None:
        """Have all ranks stop together, or end the run if nothing would be saved."""
        if self.setup.topology.nnodes == 1 and self._all_succeeded():
            # There is nothing left to interrupt.
            return
        is_interrupt = signal_number == signal.SIGINT
        if self._stop_signal:
            # Schedulers send theirs more than once.
            if is_interrupt:
                raise KeyboardInterrupt
            return
        if not self._running or not self._request_stop(signal_number):
            raise self._end_by(signal_number)
        self._stop_signal = signal_number
        self.print(f"{stopping_line(signal_number)} Ctrl-C again ends at once.")

    def _look_at_received_signals(self) -> None:
        """Stop if a rank has received a signal. Ctrl-C sends one to every process, which counts as one."""
        monitor = self._monitor
        signal_number = monitor.received_signal()
        if not signal_number or self._stop_signal or monitor.stop_signal:
            return
        if not monitor.is_stoppable():
            raise self._end_by(signal_number)
        # With an exchange, all nodes learn of it in its next step.
        if self._exchange is None:
            monitor.set_stop_signal(signal_number)

    def _end_by(self, signal_number: int) -> KeyboardInterrupt:
        """Return what ends the run at once."""
        if self.setup.is_resumable and signal_number != signal.SIGINT:
            return StoppedBySignalError(shown_signal(signal_number))
        return KeyboardInterrupt()

    def _request_stop(self, signal_number: int) -> bool:
        """Ask all ranks to stop together; return False if that would save nothing."""
        if not self._monitor.is_stoppable():
            return False
        if self._exchange is None:
            self._monitor.set_stop_signal(signal_number)
            return True
        return self._exchange.request_stop(signal_number)

    # Ending

    def _is_over(self) -> bool:
        return self._trouble is not None or self._all_exited() or not self._none_failed()

    def _all_exited(self) -> bool:
        return len(self._exits) == self.setup.topology.procs_per_node

    def _none_failed(self) -> bool:
        return all(end["status"] in _SUCCESSES and not end["early"] for end in self._exits.values())

    def _all_succeeded(self) -> bool:
        return self._trouble is None and self._all_exited() and self._none_failed()

    def _wait_for_other_nodes(self, others_done: Callable[[], bool]) -> None:
        limit_s = self.setup.limits.timeout_s + LEAVE_S
        if not self.wait_for(lambda: others_done() or self._trouble is not None, timeout_s=limit_s):
            self._trouble = f"node {self.setup.node} has waited {limit_s:g} s for the others to finish"

    def _fail(self, plan: LaunchPlan) -> Outcome:
        """Make the report before the ranks that are still alive are killed."""
        self.wait_for(self._all_exited, timeout_s=_SETTLE_S)
        report = self._report(plan)
        # A rank has lost its connection to another one, whose exit would be the cause.
        if report.first.lost_peer and not report.first.timed_out and not self._all_exited():
            self.wait_for(self._all_exited, timeout_s=_CAUSE_TIMEOUT_S)
            report = self._report(plan)
        return Outcome(status=report.first.exit_status, failure=report)

    def _report(self, plan: LaunchPlan) -> FailureReport:
        return report_failure(
            self._monitor,
            self._exchange,
            exits=list(self._exits.values()),
            cause=self._trouble or "a rank failed",
            run_dir=plan.run_dir,
            topology=self.setup.topology,
            attempt=self._attempt,
            is_last=not self._may_restart(),
            compare_dumps=self._compare_dumps,
        )

    def _compare_dumps(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        purpose = "compare the ranks' collectives"
        try:
            entry = "framework.distributed.flight_recorder:compare_dumps"
            return call_in_child(self._fork_server, entry, arguments, timeout_s=_COMPARE_S, purpose=purpose)
        except LaunchError:
            # The failure itself is still to be reported.
            return {"uncompared": f"torch's reader hasn't compared what the ranks recorded within {_COMPARE_S:g} s"}
        except FrameworkError as error:
            return {"uncompared": str(error)}

    def _end_ranks(self) -> None:
        """Kill every rank that still runs, and end what the ranks have forked.

        A killed run resumes exactly, and no rank may hold up the others. A process in an uninterruptible system call
        isn't waited for.
        """
        self._is_monitoring = False
        server = self._run_server
        if server is None:
            return
        try:
            server.end()
            self.wait_for(lambda: self._left is not None, timeout_s=ENDS_WITHIN_S)
        finally:
            self._run_server = None
            del self._handlers[server]
            server.close()
        if self._left:
            print(left_behind(self._left), file=sys.stderr, flush=True)


def failure_in_short(report: FailureReport) -> str:
    """Return the cause of a restart in a few words."""
    first = report.first
    if first.kind is FailureKind.UNREACHABLE:
        return f"node {first.node} was out of reach"
    return f"rank {first.rank} of {report.world_size} (pid {first.pid}) failed: {first.cause}"


def _control(stream: TextIO, sequence: str) -> None:
    """Send a control sequence to a terminal; to anything else nothing."""
    # The user's code may have closed the stream.
    with suppress(ValueError):
        if stream.isatty():
            stream.write(sequence)
            stream.flush()
