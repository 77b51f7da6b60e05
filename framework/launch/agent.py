"""One node's elastic agent: PyTorch's, in a process of its own, which decides when ranks start, stop and start anew.

It starts no process itself. The parent does that when told so, from the warm fork server, and says how it went. Agents
of several nodes meet by c10d rendezvous in the run's store, which node 0's keeper hosts. Before the first meeting
node 0's compares what all were started with, and hands on what is to be run.

Messages to the parent: {"event": ...}
    compared                  node 0: all nodes have come, and are alike
    offered {offer}           a further node: what node 0 wants run
    start {attempt}           all nodes are there: start the ranks
    stop                      end them: the nodes have to meet anew
    over {status, text}       nothing more to start; text: why, where the parent can't know
From the parent: {"op": ...}
    go {run_dir, offer}       meet the others; offer: for node 0 of several to hand on, else null
    ended {well}              all ranks of this node have ended
It leaves when the parent closes the connection.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import signal
import socket
import traceback
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, final

from torch.distributed import Store
from torch.distributed.elastic.agent.server.api import RunResult, SimpleElasticAgent, Worker, WorkerSpec, WorkerState
from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from framework.errors import EXIT_WRONG_REQUEST, FrameworkError, RequestError, RunError
from framework.launch.board import connect
from framework.launch.endpoint import await_listener
from framework.launch.offer import Agreement, Fingerprint, Offer
from framework.launch.quiet import CompiledOutput
from framework.launch.signals import STOP_SIGNALS
from framework.launch.wire import Channel, Message
from framework.run_dir import RunDir

_RUN_ID = "framework"
_ATTEMPTS = "framework/attempts"  # how many have begun, in the run's store
_POLL_S = 0.1
_FAREWELL_S = 5.0


@dataclass(frozen=True)
class AgentSettings:
    """What the parent tells its agent. host, port: of the run's store. fingerprint: of what this node was started with,
    None where it is alone.

    exit_timeout_s: how long to wait for the other nodes at the end.
    """

    node: int
    nnodes: int
    procs_per_node: int
    host: str
    port: int
    max_restarts: int
    init_timeout_s: float
    exit_timeout_s: float
    fingerprint: Mapping[str, Any] | None

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.port}"


def agent_main(arguments: Mapping[str, Any], fd: int | None) -> int:
    """Do what this module says; `arguments`: AgentSettings as plain types, `fd`: the connection to the parent."""
    if fd is None:
        raise ValueError("the agent needs a connection to the parent")
    for number in STOP_SIGNALS:  # the parent decides for all, also when a signal reaches every process of a job
        signal.signal(number, signal.SIG_IGN)
    # Ranks use the run's own store: torch would make one more for them, at an address that it only guesses.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the parent tells what there is to tell
    channel, output = Channel(socket.socket(fileno=fd)), CompiledOutput()
    with suppress(EOFError, OSError):  # the parent is gone, or has had enough
        channel.send({"event": "over", **_run(channel, output, AgentSettings(**arguments))})
    return 0


def _run(channel: Channel, output: CompiledOutput, settings: AgentSettings) -> Message:
    """Serve the parent; gives how it came out. Raises EOFError or OSError where the parent is gone."""
    try:
        store = _reach(settings)
        agreement = Agreement(store, count=settings.nnodes, noun="node", place=settings.endpoint)
        # To the end: a second node of this number is refused as long as this one lives.
        with nullcontext() if settings.fingerprint is None else agreement.beating():
            _agree(channel, output, settings, agreement)
            state = _make_agent(channel, store, settings).run().state
        return {"status": 0 if state is WorkerState.SUCCEEDED else 1, "text": None}
    except FrameworkError as error:
        return {"status": error.exit_status, "text": str(error)}
    except (EOFError, OSError):
        raise
    except (RendezvousError, RuntimeError) as error:  # torch's stores raise RuntimeErrors
        os.write(2, traceback.format_exc().encode())  # into the agent's log
        text = (
            f"Node {settings.node} has lost the run's store at {settings.endpoint} ({type(error).__name__}): "
            "node 0 has ended, or can't be reached.\nLook at what node 0 printed."
        )
        return {"status": 1, "text": text}


# Before the first meeting


def _agree(channel: Channel, output: CompiledOutput, settings: AgentSettings, agreement: Agreement) -> None:
    """Come back once all nodes are known to be started alike and know what to run."""
    if settings.fingerprint is not None:
        own = Fingerprint.from_plain(settings.fingerprint)
        if settings.node == 0:
            _compare(agreement, own, timeout_s=settings.init_timeout_s)
            channel.send({"event": "compared"})
        else:
            channel.send({"event": "offered", "offer": asdict(_take(agreement, own, settings))})
    go = _await_go(channel)
    output.to_log(RunDir(Path(go["run_dir"])).process_log("agent", node=settings.node))
    if go["offer"] is not None:
        agreement.make(Offer.from_plain(go["offer"]))


def _compare(agreement: Agreement, own: Fingerprint, *, timeout_s: float) -> None:
    """For node 0: wait for all nodes. Raises RunError where some don't come, ConfigError where they differ."""
    agreement.show(own)
    try:
        agreement.compare(own, timeout_s=timeout_s)
    except FrameworkError as error:
        agreement.end(error.exit_status)
        agreement.wait_for_all_to_leave(timeout_s=_FAREWELL_S)
        raise


def _take(agreement: Agreement, own: Fingerprint, settings: AgentSettings) -> Offer:
    """What node 0 wants run. Raises RequestError where it has refused or this node's number is taken, RunError where
    node 0 has ended or says nothing.
    """
    # Node 0 waits that long for all the nodes, this one has come when it may have waited for a while.
    limit_s = 2 * settings.init_timeout_s
    try:
        agreement.come(settings.node, own=own, host=socket.gethostname())
        agreement.check_against_shown(own, timeout_s=limit_s)
        answer = agreement.take(timeout_s=limit_s)
    except TimeoutError as error:
        raise RunError(
            f"Node {settings.node} has waited {limit_s:g} s for node 0 at {settings.endpoint} to say what to run.\n"
            "Look at what node 0 printed."
        ) from error
    finally:
        with suppress(RuntimeError):  # the store is gone, and who would hear it
            agreement.leave()
    if isinstance(answer, Offer):
        return answer
    kind = RequestError if answer == EXIT_WRONG_REQUEST else RunError
    raise kind(f"Node 0 at {settings.endpoint} has ended before the run began. Look at what it printed.")


def _reach(settings: AgentSettings) -> Store:
    """A connection to the run's store, once somebody listens there. Raises RunError."""
    reason = await_listener(settings.host, settings.port, timeout_s=settings.init_timeout_s)
    if reason is not None:
        raise RunError(
            f"Node {settings.node} found nobody at topology.rdzv_endpoint={settings.endpoint} within "
            f"backend.init_timeout={settings.init_timeout_s:g} s ({reason}).\n"
            "Start the same command there with topology.node_rank=0, and look whether this machine reaches it."
        )
    return connect(settings.host, settings.port, timeout_s=settings.init_timeout_s)


def _await_go(channel: Channel) -> Message:
    """The parent's message. Raises EOFError where the parent is gone."""
    while True:
        for message in channel.receive_ready():  # one at most: the parent awaits what comes of it
            return message


# Attempts


def _make_agent(channel: Channel, store: Store, settings: AgentSettings) -> Agent:
    handler = DynamicRendezvousHandler.from_backend(
        run_id=_RUN_ID,
        store=store,
        backend=C10dRendezvousBackend(store, _RUN_ID),
        min_nodes=settings.nnodes,
        max_nodes=settings.nnodes,
        # Nobody connects to it; it only has to differ, also from that of a process with the same number elsewhere.
        local_addr=f"node{settings.node:06}-{secrets.token_hex(4)}",
        timeout=RendezvousTimeout(join=timedelta(seconds=settings.init_timeout_s)),
    )
    spec = WorkerSpec(
        role="rank",
        local_world_size=settings.procs_per_node,
        rdzv_handler=handler,
        entrypoint="framework",
        max_restarts=settings.max_restarts,
        monitor_interval=_POLL_S,
    )
    return Agent(spec, channel, store=store, settings=settings)


@final
class Agent(SimpleElasticAgent):
    """Decides as torch's agents do, over ranks that the parent starts. Restarts are counted over the whole run."""

    def __init__(self, spec: WorkerSpec, channel: Channel, *, store: Store, settings: AgentSettings) -> None:
        super().__init__(spec, exit_barrier_timeout=settings.exit_timeout_s)
        self._channel = channel
        self._run_store = store
        self._settings = settings
        self._ranks_run = False
        self._ended_well: bool | None = None
        self._is_counted = False  # among the nodes whose ranks have ended well

    def _rendezvous(self, worker_group: Any) -> None:
        """Meet the agents of all nodes. Raises RunError naming those that don't come."""
        begun = self._run_store.add(_ATTEMPTS, 0)
        self._run_store.set(f"framework/agents/{begun}/{self._settings.node}", "")
        try:
            super()._rendezvous(worker_group)
        except RendezvousTimeoutError as error:
            raise RunError(self._missing(begun)) from error

    def _assign_worker_ranks(self, store: Store, *_: Any, **__: Any) -> list[Worker]:
        """Ranks node by node; and the number of the attempt, which node 0 counts for all. store: of this meeting."""
        settings = self._settings
        if settings.node == 0:
            attempt = self._run_store.add(_ATTEMPTS, 1) - 1
            store.set("attempt", str(attempt))
        else:
            attempt = int(store.get("attempt"))
        if attempt > settings.max_restarts:
            raise RunError("A node was started anew, and no restart was left: launcher.max_restarts allows for more.")
        self._attempt = attempt
        self._remaining_restarts = settings.max_restarts - attempt
        world_size = settings.nnodes * settings.procs_per_node
        ranks = [settings.node * settings.procs_per_node + local for local in range(settings.procs_per_node)]
        return [
            Worker(local, global_rank=rank, role_rank=rank, world_size=world_size, role_world_size=world_size)
            for local, rank in enumerate(ranks)
        ]

    def _start_workers(self, worker_group: Any, *_: Any, **__: Any) -> dict[int, Any]:
        self._ranks_run, self._ended_well, self._is_counted = True, None, False
        self._channel.send({"event": "start", "attempt": self._attempt})
        return {worker.local_rank: worker.global_rank for worker in worker_group.workers}

    def _stop_workers(self, *_: Any, **__: Any) -> None:
        """Have the parent end the ranks, where they run, and wait until it has."""
        if self._ranks_run:
            self._channel.send({"event": "stop"})
        while self._ranks_run:
            self._listen(timeout_s=None)

    def _monitor_workers(self, worker_group: Any) -> RunResult:
        """How the ranks of all nodes are; those here have succeeded when the others have, too."""
        self._listen(timeout_s=0)
        if self._ended_well is None:
            return RunResult(WorkerState.HEALTHY)
        if not self._ended_well:
            return RunResult(WorkerState.FAILED)
        ended_well = worker_group.store.add("ended_well", 0 if self._is_counted else 1)
        self._is_counted = True
        if ended_well < self._settings.nnodes:
            return RunResult(WorkerState.HEALTHY)
        return RunResult(WorkerState.SUCCEEDED, {worker.global_rank: None for worker in worker_group.workers})

    def _shutdown(self, *_: Any, **__: Any) -> None:
        """Nothing to do: the parent ends the ranks, and this process."""

    def _listen(self, *, timeout_s: float | None) -> None:
        """Take in what the parent says. Raises EOFError where it is gone."""
        if select.select([self._channel], [], [], timeout_s)[0]:
            for message in self._channel.receive_ready():
                self._ranks_run = False
                self._ended_well = message["well"]

    def _missing(self, begun: int) -> str:
        settings = self._settings
        keys = {node: f"framework/agents/{begun}/{node}" for node in range(settings.nnodes)}
        missing = [str(node) for node, key in keys.items() if not self._run_store.check([key])]
        who = f"Node {', '.join(missing)} of {settings.nnodes}" if missing else "Some node"
        again = "" if begun == 0 else " again"
        return (
            f"{who} didn't come to {settings.endpoint}{again} within "
            f"backend.init_timeout={settings.init_timeout_s:g} s.\nStart the same command there, or look why it ended."
        )
