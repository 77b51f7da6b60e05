"""The elastic agent's decisions, with agents in threads and the test as their parents."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, final

import pytest
from torch.distributed import TCPStore

from framework.errors import RunError
from framework.launch.agent import Agent, AgentSettings, _make_agent
from framework.launch.wire import Channel, Message

# Torch's rendezvous waits for a moment that it draws at random: hence own_state.
pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("own_state")]
LIMIT_S = 40.0


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Of a store for the agents of one run."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store  # it hosts the others until here


@final
class Node:
    """An agent in a thread. `hear` is what its parent hears; `result` its last state, or what it raised."""

    def __init__(
        self, node: int, port: int, *, nnodes: int = 2, restarts: int = 1, init_timeout_s: float = 30.0
    ) -> None:
        ours, theirs = socket.socketpair()
        self._channel, self._theirs = Channel(ours), Channel(theirs)
        self._heard: list[Message] = []
        settings = AgentSettings(
            node=node,
            nnodes=nnodes,
            procs_per_node=2,
            host="127.0.0.1",
            port=port,
            max_restarts=restarts,
            init_timeout_s=init_timeout_s,
            exit_timeout_s=30.0,
            fingerprint=None,
        )
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30), wait_for_workers=False)
        self.agent: Agent = _make_agent(self._theirs, store, settings)
        self.result: Any = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def hear(self) -> Message:
        if not self._heard:
            assert select.select([self._channel], [], [], LIMIT_S)[0], self.result
            self._heard += self._channel.receive_ready()
        return self._heard.pop(0)

    def heard_nothing(self) -> bool:
        return not self._heard and not select.select([self._channel], [], [], 0.5)[0]

    def ended(self, *, well: bool) -> None:
        self._channel.send({"op": "ended", "well": well})

    def join(self) -> Any:
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()
        return self.result

    def ranks(self) -> list[int]:
        return [worker.global_rank for worker in self.agent.get_worker_group().workers]

    def close(self) -> None:
        self._channel.close()  # whatever it waits for, it ends
        self._thread.join(LIMIT_S)
        self._stop_heartbeats()
        self._theirs.close()

    def _stop_heartbeats(self) -> None:
        """What the end of an agent's process does."""
        handler: Any = self.agent.get_worker_group().spec.rdzv_handler
        handler._stop_heartbeats()

    def _run(self) -> None:
        try:
            self.result = self.agent.run().state.value
        except Exception as error:
            self.result = error


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    made: list[Node] = []
    yield made
    for node in made:
        node.close()


def test_ranks_are_numbered_node_by_node_whoever_comes_first(port: int, nodes: list[Node]) -> None:
    nodes += [Node(2, port, nnodes=3), Node(1, port, nnodes=3), Node(0, port, nnodes=3)]
    assert [node.hear() for node in nodes] == [{"event": "start", "attempt": 0}] * 3
    assert [node.ranks() for node in nodes] == [[4, 5], [2, 3], [0, 1]]


def test_the_work_is_done_when_it_is_done_everywhere(port: int, nodes: list[Node]) -> None:
    nodes += [Node(0, port), Node(1, port)]
    for node in nodes:
        node.hear()
    nodes[0].ended(well=True)
    assert nodes[0].heard_nothing()
    assert nodes[0].result is None
    nodes[1].ended(well=True)
    assert [node.join() for node in nodes] == ["SUCCEEDED"] * 2


def test_restarts_are_counted_over_the_run_also_by_a_node_that_was_replaced(port: int, nodes: list[Node]) -> None:
    nodes += [Node(0, port, restarts=2), Node(1, port, restarts=2)]
    for attempt in range(2):
        assert [node.hear() for node in nodes] == [{"event": "start", "attempt": attempt}] * 2
        for node in nodes:
            node.ended(well=False)
    assert [node.hear()["attempt"] for node in nodes] == [2, 2]
    for node in nodes:
        node.ended(well=False)
    assert [node.join() for node in nodes] == ["FAILED"] * 2


@pytest.mark.exhaustive
def test_a_node_that_is_replaced_learns_the_number_of_the_attempt(port: int, nodes: list[Node]) -> None:
    first, lost = Node(0, port), Node(1, port)
    nodes.append(first)
    assert [first.hear()["attempt"], lost.hear()["attempt"]] == [0, 0]
    lost.close()
    first.ended(well=False)
    replaced = Node(1, port)
    nodes.append(replaced)
    assert [first.hear(), replaced.hear()] == [{"event": "start", "attempt": 1}] * 2
    assert replaced.ranks() == [2, 3]
    replaced.ended(well=False)
    assert replaced.join() == "FAILED"  # none is left


def test_a_node_that_does_not_come_is_named(port: int, nodes: list[Node]) -> None:
    nodes.append(Node(0, port, nnodes=3, init_timeout_s=1.0))
    error = nodes[0].join()
    assert isinstance(error, RunError)
    assert str(error).startswith(f"Node 1, 2 of 3 didn't come to 127.0.0.1:{port} within backend.init_timeout=1 s.")
