"""What the watchers of several nodes tell each other: how far ranks are, requests to stop, failures, and reports."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch.distributed as dist

from framework.launch import nodes
from framework.launch.board import Board
from framework.launch.nodes import Deadlined, Exchange, StoreGoneError
from framework.launch.watch import Limits, NodeWatch, RankFacts
from framework.pulse import Pulse, PulseReader


class Nodes:
    """Several nodes of one rank each, and what they share."""

    def __init__(self, count: int, stack: ExitStack) -> None:
        store = dist.HashStore()
        self.pulses: list[Pulse] = []
        self.exchanges: list[Exchange] = []
        for node in range(count):
            pulse = Pulse()
            watch = NodeWatch(node=node, limits=Limits(init_timeout_s=60.0, timeout_s=60.0, late_after_s=10.0))
            watch.add(RankFacts(node, 0, "CPU", log="/dev/null"), PulseReader(os.dup(pulse.fd)))
            exchange = Exchange(Board(store), watch, nnodes=count)
            for part in (exchange, watch, pulse):
                stack.callback(part.close)
            self.pulses.append(pulse)
            self.exchanges.append(exchange)

    def talk(self) -> None:
        """Node 0 last, so that it hears all, and once more so that all hear it."""
        for exchange in (*reversed(self.exchanges), *self.exchanges):
            exchange.step()


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Nodes]]:
    monkeypatch.setattr(nodes, "_EXCHANGE_EVERY_S", 0.0)
    with ExitStack() as stack:
        yield lambda count: Nodes(count, stack)


def test_all_nodes_know_the_foremost_ranks_the_first_request_to_stop_and_a_failure(
    make: Callable[[int], Nodes],
) -> None:
    there = make(3)
    for node, begun in enumerate((5, 9, 7)):
        there.pulses[node].beat(begun)
    there.talk()
    assert [exchange.front and exchange.front.collectives for exchange in there.exchanges] == [9, 9, 9]
    assert [exchange.alarm for exchange in there.exchanges] == [None] * 3
    there.pulses[2].wish_to_stop(signal.SIGUSR1)
    there.talk()
    there.exchanges[0].wish_to_stop(signal.SIGTERM)
    there.exchanges[1].raise_alarm("rank 1 died")
    there.talk()
    assert [pulse.asked_to_stop for pulse in there.pulses] == [signal.SIGUSR1] * 3
    assert [exchange.alarm for exchange in there.exchanges] == [{"node": 1, "cause": "rank 1 died"}] * 3


def test_node_0_gathers_all_statements_and_gives_its_report_to_all(make: Callable[[int], Nodes]) -> None:
    there = make(2)
    given: list[Any] = []
    other = threading.Thread(target=lambda: given.append(there.exchanges[1].await_report({"node": 1}, cause="x")))
    other.start()
    statements, silent = there.exchanges[0].gather({"node": 0}, cause="x")
    there.exchanges[0].publish({"first": 1})
    other.join()
    assert (statements, silent, given) == ([{"node": 0}, {"node": 1}], [], [{"first": 1}])


@pytest.mark.parametrize("is_cut", [False, True])
def test_nodes_that_say_nothing_are_named(
    make: Callable[[int], Nodes], monkeypatch: pytest.MonkeyPatch, is_cut: bool
) -> None:
    """They are silent, or the store is gone."""

    def gone(_board: Board, *_: object) -> None:
        raise dist.DistNetworkError("connection reset by peer")

    monkeypatch.setattr(nodes, "_STATEMENTS_TIMEOUT_S", 0.2)
    monkeypatch.setattr(nodes, "_REPORT_TIMEOUT_S", 0.2)
    there = make(3)
    if is_cut:
        for name in ("pulse", "raise_alarm", "publish", "wish_to_stop"):
            monkeypatch.setattr(Board, name, gone)
        there.talk()
        with pytest.raises(StoreGoneError):
            there.exchanges[0].wish_to_stop(signal.SIGTERM)
    assert there.exchanges[0].is_cut is is_cut
    assert there.exchanges[0].gather({"node": 0}, cause="x") == ([{"node": 0}], [1, 2])
    assert there.exchanges[1].await_report({"node": 1}, cause="x") is None


def test_a_store_that_does_not_answer_is_given_up() -> None:
    answer, call = threading.Event(), Deadlined()
    assert call(lambda: 3) == 3
    with pytest.raises(ValueError, match="x"):
        call(lambda: int("x"))
    for ask in (lambda: answer.wait(), lambda: True):  # the second one isn't asked
        with pytest.raises(StoreGoneError):
            call(ask, timeout_s=0.1)
    answer.set()
    call.close()
