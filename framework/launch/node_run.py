"""The parent's side of a run on one node: keeper and ranks from the warm fork server, watched without torch.

The parent waits for ends, passes on what the person at the terminal wants, asks the keeper for the report of a failure,
and ends what is left. It never outlives or leaves behind a process: see `lifetime` and `fork_server`.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

from framework.config.schema import InitMethod
from framework.errors import EXIT_STOPPED, LaunchError, TopologyError
from framework.launch.endpoint import LOOPBACK
from framework.launch.interfaces import network_environment
from framework.launch.keeper import INTERRUPTED, LEAVE_S, STORE_TIMEOUT_S
from framework.launch.panel import late_line, staying_line
from framework.launch.plan import LaunchPlan, Outcome, RankArguments, rank_environment, rendezvous_url
from framework.launch.report import FailureReport, signal_name
from framework.launch.signals import Signals
from framework.launch.site import Site
from framework.launch.terminal import show_cursor
from framework.launch.warm import Child, WarmServer
from framework.launch.watch import RankFacts
from framework.launch.wire import Channel, Message
from framework.pulse import make_memory

_SETTLE_S = 0.2  # after a first failure, so that the report has those that fell with it
_CAUSE_TIMEOUT_S = 3.0  # for the end of the rank that others lost: a process with a GPU takes its time to end
_ANSWER_TIMEOUT_S = 30.0  # the keeper's; it may be at a report, for which it asks every node
_KILL_TIMEOUT_S = 10.0
_INTERRUPT_TIMEOUT_S = 8.0
_POLL_S = 0.5
_WELL = (0, EXIT_STOPPED)


@final
class NodeRun:
    """One node's processes of a run, over all its attempts. Use `start`, then `attempt`, and `close` in any case.

    late: who was waited for, and how long. Of the last report: is_cut says that the other nodes were out of reach,
    stop_asked that the ranks were already asked to stop.
    """

    def __init__(self, site: Site, warm: WarmServer, *, folder: Path, signals: Signals) -> None:
        """folder: where ranks meet with backend.init_method=file."""
        self.site = site
        self._warm = warm
        self._folder = folder
        self._signals = signals
        self._prefix = f"{os.getpid()}#{secrets.token_hex(4)}"  # the server may serve several runs, one after another
        self._keeper, self._keeper_end = Channel.pair()
        self.port = 0
        self._attempt = 0
        self._running: dict[str, int] = {}  # key → rank, of those asked for and not known to have ended
        self._exits: dict[int, Message] = {}
        self._unconfirmed: set[int] = set()  # left well; the keeper has yet to tell whether they were done
        self._to_kill: dict[int, int] = {}  # rank → the status with which it should have left by itself
        self._answers: list[Message] = []
        self._keeper_pid = 0
        self._asked_s: dict[str, float] = {}  # of what the keeper has yet to answer
        self._trouble: str | None = None  # that no end of a local process shows
        self._stop_signal = 0
        self._others: set[str] = set()  # keys of processes that are no ranks
        self._handlers: dict[Any, Callable[[], None]] = {warm: self._on_warm, self._keeper: self._on_keeper}
        self._handlers[signals] = self._on_signal
        self.late: list[dict[str, Any]] = []
        self.is_cut = False
        self.stop_asked = False

    def start(self) -> None:
        """Start the keeper.

        Raises LaunchError where it isn't ready in time or its port can't be had, TopologyError for a wrong endpoint.
        """
        site = self.site
        arguments = {
            "nnodes": site.topology.nnodes,
            "procs_per_node": site.topology.procs_per_node,
            "node": site.node,
            "host": None if site.endpoint is None else site.endpoint[0],
            "port": None if site.endpoint is None else site.endpoint[1],
            "limits": asdict(site.limits),
            "max_restarts": site.max_restarts,
        }
        self.spawn("keeper", "framework.launch.keeper:keeper_main", arguments, end=self._keeper_end)
        if not self.wait_for(lambda: self._answers, timeout_s=site.limits.init_timeout_s + STORE_TIMEOUT_S):
            raise LaunchError(
                f"The keeper's store wasn't ready within backend.init_timeout={site.limits.init_timeout_s:g} s. "
                "Loading torch may be slow here; raise it."
            )
        answer = self._answers.pop()
        if answer["event"] == "refused":
            raise (TopologyError if answer["is_request"] else LaunchError)(answer["text"])
        self.port, self._keeper_pid = answer["port"], answer["pid"]

    def attempt(
        self,
        plan: LaunchPlan,
        number: int = 0,
        *,
        until: Callable[[], bool] = lambda: False,
        elsewhere: Callable[[], bool] = lambda: True,
    ) -> Outcome:
        """Start this node's ranks and wait for all of them; none is left on return.

        until: ends the attempt early when it becomes true; its ranks are then ended and nothing is reported.
        elsewhere: asked once this node's ranks have done their work, whether those of the other nodes have too.
        Raises KeyboardInterrupt where the run is to be ended at once.
        """
        self._forget(number)
        try:
            self._start_ranks(plan)
            self.wait_for(lambda: self._ended() or until())
            if self._all_well():
                self._wait_for_the_others(elsewhere)
            if self._all_well():
                stopped = any(end["status"] == EXIT_STOPPED for end in self._exits.values())
                return Outcome(EXIT_STOPPED if stopped else 0, stopped_by=self._stop_signal if stopped else 0)
            if until() and self._trouble is None and self._no_failure():
                return Outcome(status=1)
            return self._fail()
        except KeyboardInterrupt:
            self._tell_of_interruption()
            raise
        finally:
            self._end_ranks()

    def close(self) -> None:
        """End the keeper, and make the terminal's cursor visible again where ranks were ended early."""
        if not self._all_well():
            show_cursor()
        self._keeper_end.close()
        self._keeper.close()

    def spawn(self, name: str, entry: str, arguments: Message, *, end: socket.socket) -> None:
        """Start a process of the run that is no rank; it is handed `end` of a connection. See `Child`."""
        child = Child(self._key(name), entry, arguments)
        self._others.add(child.key)
        with end:
            self._warm.spawn(child, fd=end.fileno())

    def kill(self, name: str) -> None:
        """End such a process by SIGKILL, and wait until it is gone."""
        key = self._key(name)
        if key in self._others:
            self._warm.kill(key, signal.SIGKILL)
            self.wait_for(lambda: key not in self._others, timeout_s=_KILL_TIMEOUT_S)

    def listen(self, channel: Channel, handler: Callable[[], None]) -> None:
        """Have `handler` called whenever something can be read from `channel`."""
        self._handlers[channel] = handler

    def ignore(self, channel: Channel) -> None:
        """Undo `listen`."""
        self._handlers.pop(channel, None)

    def say(self, line: str) -> None:
        """Tell the person at the terminal."""
        if self.site.terminal:
            with suppress(OSError):  # the terminal is gone
                print(line, file=sys.stderr, flush=True)

    def wait_for(self, condition: Callable[[], Any], *, timeout_s: float | None = None) -> bool:
        """Take in events until `condition()` holds; False when the time was up before."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not condition():
            left = _POLL_S if deadline is None else min(_POLL_S, deadline - time.monotonic())
            if left <= 0:
                return False
            come = select.select(list(self._handlers), [], [], left)[0]
            for ready in come:
                if ready in self._handlers:
                    self._handlers[ready]()
            if self._keeper not in come:  # else what it was asked may be answered in what is yet to be read
                self._check_keeper()
        return True

    def ask_keeper(self, message: Message, *, timeout_s: float) -> Message:
        """The keeper's answer. Raises LaunchError where it gives none in time."""
        self._keeper.send(message)
        if not self.wait_for(lambda: self._answers, timeout_s=timeout_s):
            raise self._keeper_lost()
        return self._answers.pop()

    def _check_keeper(self) -> None:
        """Raises LaunchError where the keeper owes an answer for too long: it is frozen, and nobody watches."""
        if self._asked_s and time.monotonic() - min(self._asked_s.values()) > _ANSWER_TIMEOUT_S:
            raise self._keeper_lost()

    def _keeper_lost(self) -> LaunchError:
        """End it, too: one that is frozen doesn't leave by itself. Nothing is heard of it from now on."""
        self._asked_s.clear()
        self._handlers.pop(self._keeper, None)
        self._warm.kill(self._key("keeper"), signal.SIGKILL)
        return LaunchError(f"The keeper of this run (pid {self._keeper_pid}) doesn't answer: the run can't go on.")

    def _forget(self, attempt: int) -> None:
        """What was known of the attempt before this one."""
        self._attempt = attempt
        self._exits, self._running, self._unconfirmed, self._trouble = {}, {}, set(), None
        self._to_kill, self._asked_s = {}, {}

    def _start_ranks(self, plan: LaunchPlan) -> None:
        topology = plan.topology
        self._warm.load(plan.names)
        self._keeper.send({"op": "begin", "attempt": self._attempt, "run_dir": str(plan.run_dir.path)})
        host = LOOPBACK if plan.endpoint is None else plan.endpoint[0]
        rendezvous = rendezvous_url(plan.init_method, host=host, port=self.port, folder=self._meeting_folder(plan))
        for local_rank in range(topology.procs_per_node):
            rank = topology.rank_of(plan.node, local_rank)
            told = RankArguments(
                str(plan.run_dir.path), topology, rank=rank, rendezvous=rendezvous, attempt=self._attempt
            )
            child = Child(
                self._key(f"{self._attempt}.{rank}"),
                "framework.launch.worker:rank_main",
                {"entry": plan.entry, "rank": told.to_plain()},
                environment={
                    **network_environment(host, nnodes=topology.nnodes),
                    **rank_environment(topology, rank=rank, host=host, port=self.port, attempt=self._attempt),
                },
                log=plan.run_dir.rank_log(rank),
                terminal=plan.terminal and rank == 0,
            )
            self._running[child.key] = rank
            pulse = make_memory()
            try:
                facts = RankFacts(rank, local_rank, topology.devices_label(local_rank), log=str(child.log))
                self._keeper.send({"op": "watch", "facts": asdict(facts)}, fds=(pulse,))
                self._warm.spawn(child, fd=pulse)
            finally:
                os.close(pulse)

    def _meeting_folder(self, plan: LaunchPlan) -> Path:
        """A new one for each attempt: a rendezvous file can't be used twice."""
        folder = self._folder / str(self._attempt)
        if plan.init_method is InitMethod.FILE:
            folder.mkdir()
        return folder

    def _wait_for_the_others(self, elsewhere: Callable[[], bool]) -> None:
        limit_s = self.site.limits.timeout_s + LEAVE_S  # which theirs may take to leave
        if not self.wait_for(lambda: elsewhere() or self._trouble is not None, timeout_s=limit_s):
            self._trouble = f"node {self.site.node} has waited {limit_s:g} s for the others to come to the end"

    def _tell_of_interruption(self) -> None:
        """Let the other nodes end too, at once: their ranks would wait for those that were here."""
        if self.site.topology.nnodes > 1 and self._trouble != INTERRUPTED:
            with suppress(LaunchError, OSError):  # the keeper is gone, and they have to find out
                self.ask_keeper({"op": "interrupt"}, timeout_s=_INTERRUPT_TIMEOUT_S)

    def _fail(self) -> Outcome:
        """Report first, while everybody's word is fresh, then end those still alive."""
        self.wait_for(self._all_known, timeout_s=_SETTLE_S)
        report = self._report()
        if report.first.lost_peer and not report.first.timed_out and not self._all_known():
            self.wait_for(self._all_known, timeout_s=_CAUSE_TIMEOUT_S)
            report = self._report()
        return Outcome(status=report.first.exit_status, failure=report)

    def _report(self) -> FailureReport:
        cause = self._trouble or "a rank failed"
        answer = self.ask_keeper(
            {"op": "report", "exits": list(self._exits.values()), "cause": cause}, timeout_s=_ANSWER_TIMEOUT_S
        )
        self.is_cut, self.stop_asked = answer["is_cut"], answer["stop_asked"]
        return FailureReport.from_plain(answer["report"])

    def _ended(self) -> bool:
        return self._trouble is not None or self._all_known() or not self._no_failure()

    def _all_known(self) -> bool:
        return len(self._exits) == self.site.topology.procs_per_node and not self._unconfirmed

    def _no_failure(self) -> bool:
        return all(end["status"] in _WELL and not end["early"] for end in self._exits.values())

    def _all_well(self) -> bool:
        return self._trouble is None and self._all_known() and self._no_failure()

    def _is_complete(self) -> bool:
        """Whether the run is over and well, but for the keeper's word: there is nothing left to interrupt."""
        topology = self.site.topology
        all_left = len(self._exits) == topology.procs_per_node and topology.nnodes == 1
        return all_left and self._trouble is None and self._no_failure()

    def _end_ranks(self) -> None:
        """SIGKILL to every rank still there: nothing in one has to be tidied, and none may hold up the others.

        Nothing withstands it for long but a process in the kernel's hands, for which we don't wait.
        """
        for key in self._running:
            self._warm.kill(key, signal.SIGKILL)
        self.wait_for(lambda: not self._running, timeout_s=_KILL_TIMEOUT_S)

    def _on_keeper(self) -> None:
        try:
            for message in self._keeper.receive_ready():
                self._hear(message)
        except (EOFError, OSError) as error:
            del self._handlers[self._keeper]  # the ranks have yet to be ended and waited for
            raise LaunchError("The keeper of this run ended and its store with it: the run can't go on.") from error

    def _hear(self, message: Message) -> None:
        if message.get("attempt", self._attempt) != self._attempt:
            return  # it was on its way when the next attempt began
        match message["event"]:
            case "done":
                self._unconfirmed.discard(message["rank"])
                self._asked_s.pop(f"done {message['rank']}", None)
                self._exits[message["rank"]]["early"] = not message["done"]
            case "stays":
                self._end_who_stays(message)
            case "late":
                self.say(late_line(message))
            case "caught_up":
                told = {key: message[key] for key in ("rank", "phase", "step", "seconds")}
                self.late.append(told)
                self.say(late_line(message))
            case "hung":
                self._trouble = f"the ranks have waited for {message['seconds']:.0f} s"
            case "alarm" if message["cause"] == INTERRUPTED:
                if message["node"] != self.site.node and self._trouble != INTERRUPTED:
                    self._trouble = INTERRUPTED
                    self.say(f"Node {message['node']} was interrupted")
                    raise KeyboardInterrupt
            case "alarm":
                self._trouble = f"node {message['node']}: {message['cause']}"
            case "stopping":
                self._asked_s.pop("stop", None)
                self._go_on_stopping(ok=message["ok"])
            case _:
                self._answers.append(message)

    def _on_warm(self) -> None:
        for event in self._warm.events():
            self._note(event)

    def _note(self, event: Message) -> None:
        rank = self._running.pop(event["key"], None)
        if rank is None:
            self._others.discard(event["key"])
            return
        status = self._to_kill.get(rank, -signal.SIGKILL) if event["status"] == -signal.SIGKILL else event["status"]
        self._exits[rank] = {**event, "status": status, "rank": rank, "early": False}
        if status in _WELL:
            self._unconfirmed.add(rank)
            self._asked_s[f"done {rank}"] = time.monotonic()
            with suppress(OSError):  # the keeper is gone: said when its end of the connection is read
                self._keeper.send({"op": "done", "rank": rank})

    def _end_who_stays(self, message: Message) -> None:
        """A rank has done its work and doesn't leave: what it was to leave with counts."""
        rank, key = message["rank"], self._key(f"{self._attempt}.{message['rank']}")
        if key in self._running:
            self.say(staying_line(message, limit_s=LEAVE_S))
            self._to_kill[rank] = message["status"]
            self._warm.kill(key, signal.SIGKILL)

    def _on_signal(self) -> None:
        for number in self._signals.take():
            if self._is_complete():
                continue
            if self._stop_signal:
                if number == signal.SIGINT:
                    raise KeyboardInterrupt
                continue  # schedulers send theirs more than once
            if not self._running:
                raise KeyboardInterrupt
            self._stop_signal = number
            self._asked_s["stop"] = time.monotonic()
            self._keeper.send({"op": "stop", "signal": number})

    def _go_on_stopping(self, *, ok: bool) -> None:
        """The ranks were asked to stop; or nothing would be saved, and all is ended at once."""
        if not ok and self._is_complete():
            return
        if not ok:
            raise KeyboardInterrupt
        by = "Ctrl-C" if self._stop_signal == signal.SIGINT else signal_name(self._stop_signal)
        self.say(f"{by}: saving after a coming step, then stopping. Ctrl-C again ends at once.")

    def _key(self, name: str) -> str:
        return f"{self._prefix}#{name}"
