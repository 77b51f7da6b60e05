"""The launcher of this machine's ranks: all from the warm fork server, watched from a parent that has no torch.

The parent waits for ends, asks the keeper for the report of the first failure, and ends the others: SIGTERM, then
SIGKILL after the grace time. It never outlives or leaves behind a process: see `lifetime` and `fork_server`.
"""

from __future__ import annotations

import select
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, final

from framework.errors import LaunchError
from framework.launch.keeper import LOOPBACK
from framework.launch.plan import LaunchPlan, Outcome, RankArguments, rank_environment, rendezvous_url
from framework.launch.report import FailureReport, make_report
from framework.launch.warm import Child, WarmServer
from framework.launch.wire import Channel, Message

_SETTLE_S = 0.2  # after a first failure, so that the report has those that fell with it
_REPORT_TIMEOUT_S = 3.0
_KILL_TIMEOUT_S = 10.0
_POLL_S = 0.5


def launch(plan: LaunchPlan) -> Outcome:
    """Start the keeper and every rank, wait for all of them.

    Raises LaunchError when processes can't be started or are lost, KeyboardInterrupt on Ctrl-C and on SIGTERM; no rank
    is left in any case.
    """
    if plan.warm is None:
        raise LaunchError("launcher=local needs the fork server, which `python -m framework` starts first of all.")
    with _terminate_as_interrupt():
        return _LocalRun(plan, plan.warm).run()


@final
class _LocalRun:
    def __init__(self, plan: LaunchPlan, warm: WarmServer) -> None:
        self._plan = plan
        self._warm = warm
        self._prefix = str(plan.run_dir.path)
        self._keeper, self._keeper_end = Channel.pair()
        self._asked_for: set[int] = set()
        self._exits: dict[int, Message] = {}
        self._from_keeper: list[Message] = []
        self._watched: list[Any] = [warm, self._keeper]

    def run(self) -> Outcome:
        try:
            port = self._start_keeper()
            self._start_ranks(port)
            self._wait_for(self._ended)
            return Outcome(status=0) if self._all_well() else self._fail()
        finally:
            try:
                self._end_ranks()
            finally:
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
        rendezvous = rendezvous_url(plan.init_method, host=LOOPBACK, port=port, run_dir=plan.run_dir)
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
        self._wait_for(lambda: len(self._exits) == self._plan.topology.world_size, timeout_s=_SETTLE_S)
        exits = list(self._exits.values())
        self._keeper.send({"op": "report", "exits": exits})
        if self._wait_for(lambda: self._from_keeper, timeout_s=_REPORT_TIMEOUT_S):
            report = FailureReport.from_plain(self._from_keeper.pop()["report"])
        else:
            report = make_report([], exits, world_size=self._plan.topology.world_size)
        return Outcome(status=report.first.exit_status, failure=report)

    def _ended(self) -> bool:
        return len(self._exits) == self._plan.topology.world_size or not self._all_well()

    def _all_well(self) -> bool:
        return all(end["status"] == 0 for end in self._exits.values())

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
                self._from_keeper.extend(self._keeper.receive_ready())
            except (EOFError, OSError) as error:
                self._watched.remove(self._keeper)  # the ranks have yet to be ended and waited for
                raise LaunchError("The keeper of this run ended and its store with it: the run can't go on.") from error
        if self._warm in ready:
            for event in self._warm.events():
                self._note(event)

    def _note(self, event: Message) -> None:
        prefix, _, name = event["key"].rpartition("#")
        if event["event"] != "exited" or prefix != self._prefix or not name.isdigit():
            return
        rank = int(name)
        self._exits[rank] = {**event, "rank": rank, "log": str(self._plan.run_dir.rank_log(rank))}

    def _key(self, name: str | int) -> str:
        return f"{self._prefix}#{name}"


@contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP to the parent end the run as Ctrl-C does, instead of killing the parent alone."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
