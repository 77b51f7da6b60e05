"""Ranks that nothing of ours has started watch each other: a thread in each; the lowest that lives speaks for its node.

There is no keeper then, so the evidence has to outlive the ranks in another way: each opens the pulses of all ranks on
its node, and whoever is left can tell what became of the others. The speaker tells the other nodes how far its ranks
are, passes on wishes to stop, and makes the report of a failure; then it ends its process, since a main thread that
waits in a collective for a rank that is gone never would.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, final

from framework.errors import EXIT_RUN_FAILED, EXIT_STOPPED
from framework.launch.board import Board, Presence
from framework.launch.nodes import Deadlined, Exchange, StoreGoneError
from framework.launch.panel import late_line, render
from framework.launch.plan import RankArguments
from framework.launch.report import FailureReport
from framework.launch.reporter import Reporter
from framework.launch.watch import Limits, NodeWatch, RankFacts
from framework.pulse import Pulse, PulseReader
from framework.run_dir import RunDir

_LOOK_EVERY_S = 0.25
_SETTLE_S = 0.5  # after a first failure, so that the report has those that fell with it
_MAIN_S = 3.0  # for the main thread to come to its end by itself, after the report
_SPEAKER_S = 20.0  # for the report to be made, before a rank leaves without
_WATCHED_S = 10.0  # for the other ranks of the node to have opened this one's pulse
_TERMINATED_S = 2.0  # from SIGTERM to the end, outside of training: whoever sends it does so when another rank fails


@dataclass(frozen=True)
class Ending:
    """How this rank's part came out. report: for this rank to show; None where all is well or another one shows it."""

    status: int
    report: FailureReport | None = None


@contextmanager
def watching_each_other(
    arguments: RankArguments,
    pulse: Pulse,
    *,
    open_board: Callable[[], Board],
    limits: Limits,
    terminal: TextIO,
) -> Iterator[MutualWatch]:
    """Watch while this is entered; every rank must enter, in its main thread, with the store in reach.

    terminal: where the speaker shows what everybody should see.
    """
    watch = MutualWatch(arguments, pulse, board=open_board(), limits=limits, terminal=terminal)
    with _sigterm_to(watch.note_sigterm):
        watch.start()
        try:
            yield watch
        finally:
            watch.close()


@final
class MutualWatch:
    """One rank's part of it. `settle` must be called with how its entry came out."""

    def __init__(
        self, arguments: RankArguments, pulse: Pulse, *, board: Board, limits: Limits, terminal: TextIO
    ) -> None:
        topology = arguments.topology
        self._rank = arguments.rank
        self._pulse = pulse
        self._board = board
        self._limits = limits
        self._terminal = terminal
        self._run_dir = RunDir(Path(arguments.run_dir))
        first = topology.rank_of(arguments.node_rank, 0)
        self._local = range(first, first + topology.procs_per_node)
        self._topology = topology
        self._watch = NodeWatch(node=arguments.node_rank, limits=limits)
        self._exchange: Exchange | None = None
        if topology.nnodes > 1:
            self._exchange = Exchange(board, self._watch, nnodes=topology.nnodes)
        self._attempt = arguments.attempt
        self._ask = Deadlined()
        self._ended = threading.Event()
        self._watched = threading.Event()  # every rank of the node watches
        self._reported = threading.Event()
        self._settling = threading.Event()
        self._report: FailureReport | None = None
        self._gone: dict[int, dict[str, Any]] = {}
        self._sigterm_s: float | None = None
        self._hung = False
        self._thread = threading.Thread(target=self._run, name="mutual watch", daemon=True)

    def start(self) -> None:
        self._ask(
            lambda: self._board.arrive(Presence(self._rank, socket.gethostname(), os.getpid(), self._pulse.fd)),
            timeout_s=self._limits.init_timeout_s,
        )
        self._thread.start()

    def settle(self, status: int) -> Ending:
        """What to make of the entry's exit status, once the report is made where there is one. Takes seconds then."""
        self._settling.set()
        if status in (0, EXIT_STOPPED):
            return Ending(status)
        self._watched.wait(_WATCHED_S)  # else nobody would see the record that this rank left
        self._reported.wait(_SPEAKER_S)
        shows = self._report is not None and self._shows(self._report)
        return Ending(status, report=self._report if shows else None)

    def close(self) -> None:
        self._ended.set()
        self._thread.join(timeout=_MAIN_S)
        self._ask.close()
        if self._exchange is not None:
            self._exchange.close()
        self._watch.close()

    def note_sigterm(self) -> None:
        """SIGTERM has come. While the training loop heeds it as a request to stop, that is all it is."""
        if self._sigterm_s is None:
            self._sigterm_s = time.monotonic()

    def _run(self) -> None:
        with suppress(StoreGoneError):  # the ranks that were opened until then are watched
            self._meet()
        while not self._ended.wait(_LOOK_EVERY_S):
            self._look()

    def _meet(self) -> None:
        """Open the pulse of every rank of this node, as they come."""
        missing = set(self._local)
        while missing and not self._ended.is_set():
            for rank in sorted(missing):
                presence = self._ask(lambda rank=rank: self._board.presence(rank))  # type: ignore[misc]
                if presence is not None:
                    self._open(presence)
                    missing.discard(rank)
            if missing:
                self._look()
                self._ended.wait(_LOOK_EVERY_S)
        self._ask(lambda: self._board.watch_from(self._rank))
        while not self._ended.is_set():
            if all(self._ask(lambda rank=rank: self._board.is_watching(rank)) for rank in self._local):  # type: ignore[misc]
                self._watched.set()
                return
            self._look()
            self._ended.wait(_LOOK_EVERY_S)

    def _open(self, presence: Presence) -> None:
        rank = presence.rank
        local_rank = rank - self._local[0]
        facts = RankFacts(
            rank,
            local_rank,
            devices=self._topology.devices_label(local_rank),
            log=str(self._run_dir.rank_log(rank)),
        )
        with suppress(OSError):  # it is gone already: its starter says so, as we can't
            self._watch.add(facts, PulseReader.of_process(presence.pid, presence.pulse_fd))

    def _look(self) -> None:
        if self._is_speaker():
            self._pass_on()
        for event in self._watch.look(elsewhere=None if self._exchange is None else self._exchange.front):
            if event["event"] == "hung":
                self._hung = True
            elif self._is_speaker():
                self._say(late_line(event))
        cause = self._trouble()
        if cause is not None and not self._reported.is_set():
            self._end(cause)
        elif cause is None and self._is_terminated():
            os._exit(128 + signal.SIGTERM)

    def _pass_on(self) -> None:
        if self._exchange is not None:
            self._exchange.step()
        elif (wish := self._watch.wish()) and not self._watch.asked_to_stop:
            self._watch.ask_to_stop(wish)

    def _trouble(self) -> str | None:
        """What has gone wrong, None while nothing has."""
        for standing in self._watch.standings():
            rank = standing.rank
            if not standing.alive and not self._watch.is_done(rank) and rank not in self._gone:
                self._gone[rank] = {"rank": rank, "status": None, "time": time.time(), "early": True}
        if self._gone or self._watch.failed_by_word():
            return f"rank {min([*self._gone, *self._watch.failed_by_word()])} failed"
        if self._hung:
            return "the ranks have waited too long"
        alarm = None if self._exchange is None else self._exchange.alarm
        return None if alarm is None else f"node {alarm['node']}: {alarm['cause']}"

    def _end(self, cause: str) -> None:
        """Have the report made, by this rank if it speaks for its node; then end this process."""
        time.sleep(_SETTLE_S)
        deadline = time.monotonic() + _SPEAKER_S
        # A speaker that dies without a word, while it ends perhaps, is followed by the next.
        while not self._is_speaker() and not self._is_told() and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY_S)
        if self._is_speaker() and not self._is_told():
            self._trouble()  # those that fell meanwhile
            self._report = self._make_report(cause)
        self._reported.set()
        if self._settling.wait(_MAIN_S) or self._ended.is_set():
            return  # the main thread ends by itself
        if self._report is not None and self._shows(self._report):
            self._say(render(self._report))
            if self._watch.node == 0:
                with suppress(OSError):  # the disk refuses; the terminal has it
                    self._run_dir.update_run({"status": "failed"})
        os._exit(EXIT_RUN_FAILED)

    def _make_report(self, cause: str) -> FailureReport:
        reporter = Reporter(
            self._watch,
            self._exchange,
            self._run_dir,
            nnodes=self._topology.nnodes,
            procs_per_node=self._topology.procs_per_node,
            attempt=self._attempt,
            is_last=True,
        )
        report = reporter.report(list(self._gone.values()), cause=cause)
        if self._exchange is None:
            with suppress(StoreGoneError):
                self._ask(lambda: self._board.publish(report.to_plain()))
        return report

    def _shows(self, report: FailureReport) -> bool:
        """Node 0's report is shown there; another node shows only its own, of its side of a cut."""
        return self._watch.node == 0 or report.node == self._watch.node

    def _is_told(self) -> bool:
        """Whether there is a report of this failure already: in its file, or on the board."""
        nodes = {0, self._watch.node}
        if any(self._run_dir.failure_of(node=node, attempt=self._attempt, is_last=True).exists() for node in nodes):
            return True
        try:
            return self._ask(self._board.report) is not None
        except StoreGoneError:
            return False

    def _is_speaker(self) -> bool:
        living = [standing.rank for standing in self._watch.standings() if standing.alive]
        return self._rank == min(living, default=self._rank)

    def _is_terminated(self) -> bool:
        if self._sigterm_s is None:
            return False
        if self._watch.is_stoppable():
            self._sigterm_s = None
            return False
        return time.monotonic() - self._sigterm_s > _TERMINATED_S

    def _say(self, text: str) -> None:
        with suppress(OSError, ValueError):  # the terminal is gone
            print(text, file=self._terminal, flush=True)


@contextmanager
def _sigterm_to(note: Callable[[], None]) -> Iterator[None]:
    """Have SIGTERM call `note`, also while the main thread waits in C++ and runs no handler: it wakes a thread."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)

    def listen() -> None:
        while received := ours.recv(64):
            if signal.SIGTERM in received:
                note()

    listener = threading.Thread(target=listen, name="signals", daemon=True)
    listener.start()
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    wakeup = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGTERM, before)
        theirs.close()
        listener.join()
        ours.close()


def stderr_of_the_terminal() -> TextIO:
    """Where stderr goes now, whatever it is made to be later; for `terminal`."""
    return os.fdopen(os.dup(sys.stderr.fileno()), "w", buffering=1, encoding="utf-8", errors="backslashreplace")
