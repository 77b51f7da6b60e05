"""The launcher of this machine's ranks: all from the warm fork server, watched from a parent that has no torch.

The parent waits for ends, asks the keeper for the report of the first failure, and ends the others: SIGTERM, then
SIGKILL after the grace time. It never outlives or leaves behind a process: see `lifetime` and `fork_server`.
"""

from __future__ import annotations

import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, final

from framework.config.schema import InitMethod
from framework.errors import LaunchError
from framework.launch.keeper import LOOPBACK
from framework.launch.plan import LaunchPlan, Outcome, RankArguments, rank_environment, rendezvous_url
from framework.launch.report import FailureReport, make_report
from framework.launch.warm import Child, WarmServer
from framework.launch.wire import Channel, Message

_SETTLE_S = 0.2  # after a first failure, so that the report has those that fell with it
_CAUSE_TIMEOUT_S = 3.0  # for the end of the rank that others lost: a process with a GPU takes its time to end
_REPORT_TIMEOUT_S = 3.0
_KILL_TIMEOUT_S = 10.0
_POLL_S = 0.5
_PRELOAD = ("torch", "torch.distributed")
_SHOW_CURSOR = "\x1b[?25h"


def launch(plan: LaunchPlan) -> Outcome:
    """Start the keeper and every rank, wait for all of them; and a fork server for them where none was given.

    Raises LaunchError when processes can't be started or are lost, KeyboardInterrupt on Ctrl-C and on SIGTERM; no rank
    is left in any case.
    """
    with _terminate_as_interrupt(), _server(plan.warm) as warm, _meeting_folder(plan.init_method) as folder:
        return _LocalRun(plan, warm, folder=folder).run()


@final
class _LocalRun:
    def __init__(self, plan: LaunchPlan, warm: WarmServer, *, folder: Path) -> None:
        self._plan = plan
        self._warm = warm
        self._folder = folder  # where ranks meet with backend.init_method=file
        self._prefix = str(plan.run_dir.path)
        self._keeper, self._keeper_end = Channel.pair()
        self._asked_for: set[int] = set()
        self._exits: dict[int, Message] = {}
        self._unconfirmed: set[int] = set()  # left with status 0; the keeper has yet to tell whether they were done
        self._from_keeper: list[Message] = []
        self._watched: list[Any] = [warm, self._keeper]

    def run(self) -> Outcome:
        well = False
        try:
            port = self._start_keeper()
            self._start_ranks(port)
            self._wait_for(self._ended)
            well = self._all_well()
            return Outcome(status=0) if well else self._fail()
        finally:
            try:
                self._end_ranks()
            finally:
                if not well:
                    _show_cursor()
                self._keeper_end.close()
                self._keeper.close()

    def _start_keeper(self) -> int:
        arguments = {"run_dir": self._prefix, "world_size": self._plan.topology.world_size}
        child = Child(self._key("keeper"), "framework.launch.keeper:keeper_main", arguments)
        self._warm.spawn(child, fd=self._keeper_end.fileno())
        self._keeper_end.close()
        if not self._wait_for(lambda: self._from_keeper, timeout_s=self._plan.start_timeout_s):
            raise LaunchError(
                f"The keeper's store wasn't ready within backend.init_timeout={self._plan.start_timeout_s:g} s. "
                "Loading torch may be slow here; raise it."
            )
        port: int = self._from_keeper.pop()["port"]
        return port

    def _start_ranks(self, port: int) -> None:
        plan = self._plan
        rendezvous = rendezvous_url(plan.init_method, host=LOOPBACK, port=port, folder=self._folder)
        for rank in range(plan.topology.world_size):
            self._asked_for.add(rank)
            told = RankArguments(self._prefix, plan.topology, rank=rank, rendezvous=rendezvous)
            self._warm.spawn(
                Child(
                    self._key(rank),
                    "framework.launch.worker:rank_main",
                    {"entry": plan.entry, "rank": told.to_plain()},
                    environment=rank_environment(plan.topology, rank=rank, host=LOOPBACK, port=port),
                    log=plan.run_dir.rank_log(rank),
                    terminal=plan.terminal and rank == 0,
                )
            )

    def _fail(self) -> Outcome:
        """Report first, while everybody's word is fresh, then end those still alive."""
        self._wait_for(self._all_known, timeout_s=_SETTLE_S)
        report = self._report()
        if report.first.is_lost_peer and not self._all_known():
            self._wait_for(self._all_known, timeout_s=_CAUSE_TIMEOUT_S)
            report = self._report()
        return Outcome(status=report.first.exit_status, failure=report)

    def _report(self) -> FailureReport:
        exits = list(self._exits.values())
        with suppress(OSError):  # the keeper is gone: said when its end of the connection is read
            self._keeper.send({"op": "report", "exits": exits})
        if self._wait_for(lambda: self._from_keeper, timeout_s=_REPORT_TIMEOUT_S):
            return FailureReport.from_plain(self._from_keeper.pop()["report"])
        return make_report([], exits, world_size=self._plan.topology.world_size)

    def _ended(self) -> bool:
        return self._all_known() or not self._all_well()

    def _all_known(self) -> bool:
        return len(self._exits) == self._plan.topology.world_size and not self._unconfirmed

    def _all_well(self) -> bool:
        return all(end["status"] == 0 and not end["early"] for end in self._exits.values())

    def _end_ranks(self) -> None:
        """SIGTERM to every rank still there, SIGKILL after the grace time or at once on a second Ctrl-C."""
        try:
            if self._signal_living(signal.SIGTERM):
                self._wait_for(self._none_left, timeout_s=self._plan.grace_s)
        finally:
            # Nothing withstands SIGKILL for long but a process in the kernel's hands, for which we don't wait.
            if self._signal_living(signal.SIGKILL):
                self._wait_for(self._none_left, timeout_s=_KILL_TIMEOUT_S)

    def _none_left(self) -> bool:
        return self._asked_for <= self._exits.keys()

    def _signal_living(self, signal_number: signal.Signals) -> bool:
        living = self._asked_for - self._exits.keys()
        for rank in living:
            self._warm.kill(self._key(rank), signal_number)
        return bool(living)

    def _wait_for(self, condition: Any, *, timeout_s: float | None = None) -> bool:
        """Take in events until `condition()` holds; False when the time was up before."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not condition():
            left = _POLL_S if deadline is None else min(_POLL_S, deadline - time.monotonic())
            if left <= 0:
                return False
            self._take_in(select.select(self._watched, [], [], left)[0])
        return True

    def _take_in(self, ready: list[Any]) -> None:
        if self._keeper in ready:
            try:
                for message in self._keeper.receive_ready():
                    self._hear(message)
            except (EOFError, OSError) as error:
                self._watched.remove(self._keeper)  # the ranks have yet to be ended and waited for
                raise LaunchError("The keeper of this run ended and its store with it: the run can't go on.") from error
        if self._warm in ready:
            for event in self._warm.events():
                self._note(event)

    def _hear(self, message: Message) -> None:
        if message["event"] == "done":
            self._unconfirmed.discard(message["rank"])
            self._exits[message["rank"]]["early"] = not message["done"]
        else:
            self._from_keeper.append(message)

    def _note(self, event: Message) -> None:
        prefix, _, name = event["key"].rpartition("#")
        if event["event"] != "exited" or prefix != self._prefix or not name.isdigit():
            return
        rank = int(name)
        self._exits[rank] = {**event, "rank": rank, "early": False, "log": str(self._plan.run_dir.rank_log(rank))}
        if event["status"] == 0:
            self._unconfirmed.add(rank)
            with suppress(OSError):  # the keeper is gone: said when its end of the connection is read
                self._keeper.send({"op": "done", "rank": rank})

    def _key(self, name: str | int) -> str:
        return f"{self._prefix}#{name}"


@contextmanager
def _server(given: WarmServer | None) -> Iterator[WarmServer]:
    """The server that was given, or else a new one, closed at the end."""
    if given is not None:
        yield given
        return
    server = WarmServer.start(_PRELOAD)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def _meeting_folder(method: InitMethod) -> Iterator[Path]:
    """A new folder for the rendezvous file, where there is to be one; removed at the end."""
    if method is not InitMethod.FILE:
        yield Path()
        return
    with TemporaryDirectory(prefix="framework_", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _show_cursor() -> None:
    """A rank that was ended while it drew a progress bar has left the terminal's cursor hidden."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the terminal is gone, or the stream closed
            if stream.isatty():
                stream.write(_SHOW_CURSOR)
                stream.flush()


@contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP to the parent end the run as Ctrl-C does, instead of killing the parent alone.

    A signal that is ignored (`nohup` has SIGHUP ignored) stays so.
    """

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGTERM, signal.SIGHUP)
    heeded = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
