"""The keeper: a process that is never a rank, hosts the store the ranks meet at, watches them and writes the report.

It is the first child of the fork server for a run, so what it knows survives any rank. On one machine its port is bound
before it is named, on the loopback interface only: nobody can take it in between. With several nodes there is one on
each; node 0's hosts the store at the endpoint that all were given, the others are its clients.

Messages from the parent: {"op": ...}
    begin {attempt, run_dir}           a new attempt: forget the ranks of the last one
    watch {facts} and a descriptor     a rank of it, with its pulse
    done {rank}                        has this rank, which left with status 0, done its work?
    stop {signal}                      ask all ranks to stop together
    report {exits, cause}              the attempt has failed: make the report
    interrupt                          this node's part is ended at once: tell the others
Answers and events: {"event": ...}
    ready {port, pid} or refused {text, is_request}, report {report, is_cut, stop_asked}, interrupted
    and of an attempt: done {rank, done}, stays {rank, pid, status, frames}, stopping {ok}, late,
    caught_up {rank, phase, step, seconds}, hung {seconds}, alarm {node, cause}
It leaves when the parent closes the connection.
"""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from framework.errors import FrameworkError, LaunchError, RequestError, TopologyError
from framework.launch.board import Board, connect
from framework.launch.endpoint import LOOPBACK, listen
from framework.launch.nodes import Deadlined, Exchange, StoreGoneError
from framework.launch.quiet import CompiledOutput
from framework.launch.reporter import Reporter
from framework.launch.watch import Limits, NodeWatch, RankFacts
from framework.launch.wire import Channel, Message
from framework.pulse import PulseReader
from framework.run_dir import RunDir

if TYPE_CHECKING:
    from torch.distributed import Store

INTERRUPTED = "interrupted"
"""The cause of an alarm after which nobody goes on, and nothing is reported."""

LEAVE_S = 10.0
"""How long ranks may take to leave once all of the node have done their work."""

STORE_TIMEOUT_S = 10.0
"""How long node 0 may take to reach the store that it hosts, at most."""

_LOOK_EVERY_S = 0.2


def keeper_main(arguments: Mapping[str, Any], fd: int | None) -> int:
    """Serve until the parent closes its end.

    `arguments`: nnodes, procs_per_node, node, host and port of the endpoint (null on one node), limits, max_restarts.
    """
    if fd is None:
        raise ValueError("the keeper needs a connection to the parent")
    # The parent decides for all, also when a signal reaches every process of a job: it ends this one by leaving.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=fd))
    try:
        keeper = Keeper(channel, arguments)
    except FrameworkError as error:
        channel.send({"event": "refused", "text": str(error), "is_request": isinstance(error, RequestError)})
        return 1
    try:
        keeper.serve()
    except (EOFError, OSError):
        keeper.close()
    return 0


@final
class Keeper:
    """One node's keeper; it lives as long as the run, over all of its attempts."""

    def __init__(self, channel: Channel, arguments: Mapping[str, Any]) -> None:
        """Raises LaunchError where the store can't be hosted, or reached; TopologyError where the endpoint is wrong."""
        self._channel = channel
        self._run_dir = RunDir(Path())
        self._output = CompiledOutput() if arguments["nnodes"] > 1 else None  # alone, it never loses a store
        self._nnodes: int = arguments["nnodes"]
        self._procs_per_node: int = arguments["procs_per_node"]
        self._node: int = arguments["node"]
        self._max_restarts: int = arguments["max_restarts"]
        self._limits = Limits(**arguments["limits"])
        self._store, port = self._meet(arguments["host"], arguments["port"])
        self._attempt = 0
        self._watch = NodeWatch(node=self._node, limits=self._limits)
        self._exchange: Exchange | None = None
        self._said: set[str] = set()
        channel.send({"event": "ready", "port": port, "pid": os.getpid()})

    def serve(self) -> None:
        """Answer and watch, until the connection is closed: raises EOFError or OSError then."""
        while True:
            if select.select([self._channel], [], [], _LOOK_EVERY_S)[0]:
                for message in self._channel.receive_ready():
                    getattr(self, f"_on_{message['op']}")(message)
            self._look()

    def close(self) -> None:
        self._watch.close()
        if self._exchange is not None:
            self._exchange.close()

    def _meet(self, host: str | None, port: int | None) -> tuple[Store, int]:
        if self._node == 0:
            return _host_store(host, port, timeout_s=min(STORE_TIMEOUT_S, self._limits.init_timeout_s))
        if host is None or port is None:
            raise ValueError("a further node needs the endpoint of node 0")
        try:
            return connect(host, port, timeout_s=self._limits.init_timeout_s), port
        except RuntimeError as error:
            raise LaunchError(f"Node {self._node} can't use the store at {host}:{port}: {error}") from error

    def _on_begin(self, message: Message) -> None:
        self.close()
        self._attempt = message["attempt"]
        self._run_dir = RunDir(Path(message["run_dir"]))
        if self._output is not None:
            self._output.to_log(self._run_dir.process_log("keeper", node=self._node))
        self._watch = NodeWatch(node=self._node, limits=self._limits)
        self._said.clear()
        if self._nnodes > 1:
            board = Board(self._store, attempt=self._attempt)
            self._exchange = Exchange(board, self._watch, nnodes=self._nnodes)

    def _tell(self, event: Message) -> None:
        """Say what is true of this attempt only."""
        self._channel.send({**event, "attempt": self._attempt})

    def _on_watch(self, message: Message) -> None:
        self._watch.add(RankFacts(**message["facts"]), PulseReader(self._channel.take_fd()))

    def _on_done(self, message: Message) -> None:
        rank = message["rank"]
        self._look()  # that it was late and has come is told before: nobody listens after the last one
        self._tell({"event": "done", "rank": rank, "done": self._watch.is_done(rank)})

    def _on_stop(self, message: Message) -> None:
        if not self._watch.is_stoppable():
            self._tell({"event": "stopping", "ok": False})
            return
        try:
            self._ask_to_stop(message["signal"])
        except StoreGoneError:
            self._tell({"event": "stopping", "ok": False})
        else:
            self._tell({"event": "stopping", "ok": True})

    def _on_report(self, message: Message) -> None:
        reporter = Reporter(
            self._watch,
            self._exchange,
            self._run_dir,
            nnodes=self._nnodes,
            procs_per_node=self._procs_per_node,
            attempt=self._attempt,
            is_last=self._attempt >= self._max_restarts or self._watch.asked_to_stop != 0,
        )
        report = reporter.report(message["exits"], cause=message["cause"])
        is_cut = self._exchange is not None and self._exchange.is_cut
        stop_asked = self._watch.asked_to_stop != 0
        self._channel.send({"event": "report", "report": report.to_plain(), "is_cut": is_cut, "stop_asked": stop_asked})

    def _on_interrupt(self, _message: Message) -> None:
        if self._exchange is not None:
            self._exchange.raise_alarm(INTERRUPTED)
        self._channel.send({"event": "interrupted"})

    def _ask_to_stop(self, signal_number: int) -> None:
        if self._exchange is None:
            self._watch.ask_to_stop(signal_number)
        else:
            self._exchange.wish_to_stop(signal_number)

    def _look(self) -> None:
        exchange = self._exchange
        if exchange is not None:
            exchange.step()
            if exchange.alarm is not None and "alarm" not in self._said:
                self._said.add("alarm")
                self._tell({"event": "alarm", **exchange.alarm})
        elif (wish := self._watch.wish()) and not self._watch.asked_to_stop:
            self._watch.ask_to_stop(wish)
        for event in self._watch.look(elsewhere=None if exchange is None else exchange.front):
            if event["event"] == "hung":
                if "hung" in self._said:
                    continue
                self._said.add("hung")
            self._tell(event)
        self._look_who_stays()

    def _look_who_stays(self) -> None:
        """A thread or an exit function of the user's may hold up a process whose work is done."""
        if "stays" in self._said:
            return
        for event in self._watch.staying(count=self._procs_per_node, limit_s=LEAVE_S):
            self._said.add("stays")
            self._tell({"event": "stays", **event})


def _host_store(host: str | None, port: int | None, *, timeout_s: float) -> tuple[Store, int]:
    """The store of a run on this machine: on loopback at a free port, or at the endpoint that other nodes know."""
    from torch.distributed import TCPStore

    try:
        listener = listen(host, port or 0)
    except OSError as error:
        raise LaunchError(
            f"Node 0 can't host the run at topology.rdzv_endpoint={host}:{port}: {os.strerror(error.errno or 0)}.\n"
            "Name a port that is free on this machine, the same on every node."
        ) from error
    bound: int = listener.getsockname()[1]
    call = Deadlined()
    try:
        # With a deadline: where something else listens at that address, torch may wait for its answer without end.
        store = call(
            lambda: TCPStore(
                LOOPBACK if host is None else host,
                bound,
                is_master=True,
                timeout=timedelta(seconds=STORE_TIMEOUT_S),
                wait_for_workers=False,
                master_listen_fd=listener.detach(),  # the store owns and closes it from here on
            ),
            timeout_s=timeout_s,
        )
    except StoreGoneError as error:
        if host is None:
            raise LaunchError(
                f"The run's store at {LOOPBACK}:{bound} can't be reached: {error.__cause__ or 'no answer'}"
            ) from error
        raise TopologyError(
            f"Node 0 doesn't reach itself at topology.rdzv_endpoint={host}:{port}.\n"
            "Name node 0 by an address that is its own, as the other nodes know it."
        ) from error
    finally:
        call.close()
    return store, bound
