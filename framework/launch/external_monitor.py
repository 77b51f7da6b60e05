"""The monitor of ranks that torchrun, srun or Kubernetes started: a thread in each rank.

No process of ours outlives the ranks, so each opens the rank statuses of all ranks on its node. The lowest living rank
of a node acts for it: it exchanges progress and stop requests with the other nodes, and makes the report of a failure.
After a failure every thread ends its process, since a main thread that waits in a collective never would.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO, final

from framework.distributed.flight_recorder import compare_dumps
from framework.distributed.store import RunStore, StoreGoneError, UnverifiedError, call_with_deadline
from framework.errors import EXIT_INTERRUPTED, EXIT_RUN_FAILED, EXIT_STOPPED
from framework.launch.plan import Outcome, RankArguments
from framework.monitoring.node_exchange import NodeExchange
from framework.monitoring.node_monitor import Limits, NodeMonitor, RankInfo
from framework.monitoring.rank_status import RankStatus
from framework.monitoring.report import FailureReport, late_line, render, report_failure
from framework.system.run_dir import RunDir, read_object
from framework.system.signals import Signals, shown_signal

_LOOK_EVERY_S = 0.25
# How long to wait after a first failure, so that the report has the ranks that fail with it.
_SETTLE_S = 0.5
# How long the main thread may take to end by itself after the report.
_MAIN_S = 3.0
# How long to wait for another rank to make the report.
_REPORT_S = 20.0
# The time from a signal to the end, unless the training loop handles it: SIGTERM may be sent after a failure.
_TERMINATED_S = 2.0


@final
class ExternalMonitor:
    """One rank's monitor. Call `start` in the main thread, `settle` with the exit status of the entry, and `close`."""

    def __init__(
        self,
        arguments: RankArguments,
        rank_status: RankStatus,
        *,
        store: RunStore,
        limits: Limits,
        is_resumable: bool,
        terminal: TextIO,
        signals: Signals,
    ) -> None:
        self._arguments = arguments
        self._topology = arguments.topology
        self._rank_status = rank_status
        self._store = store
        self._limits = limits
        self._is_resumable = is_resumable
        self._terminal = terminal
        self._signals = signals
        self._run_dir = RunDir(Path(arguments.run_dir))
        self._monitor = NodeMonitor(node=arguments.node_rank, limits=limits, own=rank_status)
        self._exchange = NodeExchange(store, self._monitor, nnodes=arguments.topology.nnodes)
        # Set by `close`.
        self._ended = threading.Event()
        # Set once there is a report, or waiting for one has timed out.
        self._reported = threading.Event()
        # Set once the main thread has left the entry.
        self._settling = threading.Event()
        self._report: FailureReport | None = None
        # If this rank prints the report.
        self._shows_report = False
        # How the ranks of this node ended that weren't done, by rank, as for `report_failure`.
        self._gone: dict[int, dict[str, Any]] = {}
        self._hung = False
        # Of this rank: the signal to stop by that the training loop doesn't handle, and since when.
        self._signal = 0
        self._signalled_s = 0.0
        # How often Ctrl-C was pressed.
        self._interrupts = 0
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)

    def start(self) -> None:
        # If the store is lost or a rank is late, the ranks that were opened until then are monitored.
        with suppress(StoreGoneError, TimeoutError):
            call_with_deadline(self._open_rank_statuses, timeout_s=2 * self._limits.init_timeout_s)
        self._thread.start()

    def settle(self, status: int) -> Outcome:
        """Return the outcome of this rank, after a failure with the report's exit status. That takes seconds.

        Rank 0's outcome has the report if it has to be shown; another rank shows it.
        """
        self._settling.set()
        if status == 0 or (status == EXIT_STOPPED and self._cause() is None):
            return Outcome(status)
        self._reported.wait(_REPORT_S)
        if self._report is None:
            return Outcome(status)
        status = self._report.first.exit_status
        if self._arguments.rank > 0:
            self._show_report()
            return Outcome(status)
        if self._shows_report:
            return Outcome(status, failure=self._report)
        return Outcome(status)

    def close(self) -> None:
        self._ended.set()
        self._thread.join(timeout=_MAIN_S)
        self._monitor.close()

    def _open_rank_statuses(self) -> None:
        """Open the statuses of all ranks on this node, and wait until all ranks have done so.

        Only then may a rank that fails leave, since its status outlives it where it is open.
        """
        this_rank = self._arguments.rank
        topology = self._topology
        limit_s = self._limits.init_timeout_s
        first = topology.rank_of(self._arguments.node_rank, 0)
        ranks = range(first, first + topology.procs_per_node)

        self._store.set(f"rank_status/{this_rank}", [os.getpid(), self._rank_status.fd])
        for local_rank, rank in enumerate(ranks):
            pid, fd = self._store.wait_for(f"rank_status/{rank}", timeout_s=limit_s)
            log = str(self._run_dir.rank_log(rank))
            info = RankInfo(rank, local_rank, devices=topology.devices_label(local_rank), log=log)
            # The rank may have ended already, which only its starter can report.
            with suppress(OSError):
                self._monitor.add(info, RankStatus.of_process(pid, fd))

        self._store.set(f"monitoring/{this_rank}", True)
        for rank in ranks:
            self._store.wait_for(f"monitoring/{rank}", timeout_s=limit_s)

    def _run(self) -> None:
        while not self._ended.wait(_LOOK_EVERY_S):
            try:
                self._look()
            except UnverifiedError as error:
                self._say(str(error))
                os._exit(error.exit_status)

    def _look(self) -> None:
        """Look once at signals, at stop requests and at the ranks; end this process after a failure."""
        self._note_signals()
        if self._acts_for_node():
            self._pass_on_stop_requests()
        for event in self._monitor.check(elsewhere=self._exchange.progress_elsewhere):
            if event["event"] == "hung":
                self._hung = True
            elif self._acts_for_node():
                self._say(late_line(event))
        cause = self._cause()
        if cause is not None and not self._reported.is_set():
            self._end(cause)
        elif cause is None and self._is_terminated():
            self._end_by_signal()

    def _note_signals(self) -> None:
        received = self._signals.take()
        self._interrupts += received.count(signal.SIGINT)
        if self._interrupts > 1:
            # The main thread may be waiting in compiled code, where it sees neither.
            self._say("Interrupted twice: ended at once")
            os._exit(EXIT_INTERRUPTED)
        for number in received:
            if number != signal.SIGINT:
                # The main thread may be waiting in compiled code, where handlers don't run.
                self._rank_status.request_stop(number)

    def _pass_on_stop_requests(self) -> None:
        if self._topology.nnodes > 1:
            self._exchange.step()
            return
        signal_number = self._monitor.received_signal()
        if signal_number and not self._monitor.stop_signal:
            self._monitor.set_stop_signal(signal_number)

    def _cause(self) -> str | None:
        """Return what has gone wrong, or None."""
        for state in self._monitor.states():
            if not state.alive and not state.done and state.rank not in self._gone:
                self._gone[state.rank] = {"rank": state.rank, "status": None, "time": time.time(), "early": True}
        failed = [*self._gone, *self._monitor.ranks_that_raised()]
        if failed:
            return f"rank {min(failed)} failed"
        if self._hung:
            return "the ranks have waited too long"
        alarm = self._exchange.alarm
        if alarm is not None:
            return f"node {alarm['node']}: {alarm['cause']}"
        return None

    def _end(self, cause: str) -> None:
        """Make the report, or wait for it, then end this process if the main thread doesn't."""
        time.sleep(_SETTLE_S)
        self._report = self._make_or_await_report(cause)
        self._reported.set()
        if self._settling.wait(_MAIN_S) or self._ended.is_set():
            return
        self._show_report()
        if self._report is None:
            os._exit(EXIT_RUN_FAILED)
        os._exit(self._report.first.exit_status)

    def _show_report(self) -> None:
        """Print the report if this rank has to, and record the failure: rank 0's command may be gone."""
        if self._report is not None and self._shows_report:
            self._say(render(self._report))
            if self._monitor.node == 0:
                # If the disk is full, at least the terminal has the report.
                with suppress(OSError, ValueError):
                    self._run_dir.update_run({"status": "failed"})

    def _make_or_await_report(self, cause: str) -> FailureReport | None:
        deadline = time.monotonic() + _REPORT_S
        while time.monotonic() < deadline:
            report = self._find_report()
            if report is not None:
                return report
            # This rank may act for the node only since the one that did so has died.
            if self._acts_for_node():
                # This adds the ranks that have ended meanwhile to the exits.
                self._cause()
                return self._make_report(cause)
            time.sleep(_LOOK_EVERY_S)
        return None

    def _find_report(self) -> FailureReport | None:
        """Return the report of this failure if there is one, from its file or from the store."""
        for node in (0, self._monitor.node):
            file = self._run_dir.failure_of(node=node, attempt=self._arguments.attempt, is_last=True)
            plain = read_object(file)
            if plain is not None:
                return FailureReport.from_plain(plain)
        plain = self._exchange.find_report()
        if plain is None:
            return None
        return FailureReport.from_plain(plain)

    def _make_report(self, cause: str) -> FailureReport:
        report = report_failure(
            self._monitor,
            self._exchange,
            exits=list(self._gone.values()),
            cause=cause,
            run_dir=self._run_dir,
            topology=self._topology,
            attempt=self._arguments.attempt,
            is_last=True,
            compare_dumps=compare_dumps,
        )
        # Node 0's report is shown there; another node shows only one of its own side of a cut.
        self._shows_report = self._monitor.node in (0, report.node)
        return report

    def _acts_for_node(self) -> bool:
        living = [state.rank for state in self._monitor.states() if state.alive]
        return self._arguments.rank == min(living, default=self._arguments.rank)

    def _is_terminated(self) -> bool:
        """Return True if a stop was requested and no training loop handles that, as before the first step."""
        page = self._rank_status.read()
        number = page.stop_signal or page.received_signal
        if not number or self._monitor.is_stoppable_anywhere() or page.is_done:
            self._signal = 0
            return False
        if not self._signal:
            self._signal = number
            self._signalled_s = time.monotonic()
        return time.monotonic() - self._signalled_s > _TERMINATED_S

    def _end_by_signal(self) -> None:
        """End this process, as the other ranks end theirs: `request_stop` is passed on to all."""
        name = shown_signal(self._signal)
        status = EXIT_STOPPED if self._is_resumable else 128 + self._signal
        if self._arguments.rank == 0:
            self._say(f"Stopped by {name}")
            with suppress(OSError, ValueError):  # a full disk
                self._run_dir.update_run({"status": "stopped" if self._is_resumable else "interrupted"})
        # No failure of this rank, for the others.
        self._rank_status.mark_done()
        os._exit(status)

    def _say(self, text: str) -> None:
        # The terminal may be gone.
        with suppress(OSError, ValueError):
            print(text, file=self._terminal, flush=True)
