from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch.distributed as dist

from framework.launch import nodes
from framework.launch.board import Board
from framework.launch.nodes import Deadlined, Exchange, StoreGoneError
from framework.launch.standing import Front
from framework.launch.watch import Limits, NodeWatch, RankFacts
from framework.pulse import Pulse, PulseReader


@pytest.fixture
def deadlined() -> Iterator[Deadlined]:
    made = Deadlined()
    yield made
    made.close()


def test_calls_give_what_they_give(deadlined: Deadlined) -> None:
    assert deadlined(lambda: 3) == 3
    with pytest.raises(ValueError, match="x"):
        deadlined(lambda: int("x"))
    assert deadlined(lambda: None) is None


def test_a_store_that_refuses_is_gone_for_good(deadlined: Deadlined) -> None:
    with pytest.raises(StoreGoneError):
        deadlined(lambda: (_ for _ in ()).throw(dist.DistNetworkError("connection reset")))
    with pytest.raises(StoreGoneError):
        deadlined(lambda: 3)


def test_a_store_that_does_not_answer_is_gone_for_good_and_holds_up_nobody(deadlined: Deadlined) -> None:
    answer = threading.Event()
    with pytest.raises(StoreGoneError):
        deadlined(answer.wait, timeout_s=0.1)
    with pytest.raises(StoreGoneError):
        deadlined(lambda: 3)
    answer.set()


class Nodes:
    """Several nodes of one rank each, and what they share."""

    def __init__(self, count: int, stack: ExitStack) -> None:
        store = dist.HashStore()
        self.pulses: list[Pulse] = []
        self.watches: list[NodeWatch] = []
        self.exchanges: list[Exchange] = []
        for node in range(count):
            pulse = Pulse()
            watch = NodeWatch(node=node, limits=Limits(init_timeout_s=60.0, timeout_s=60.0, late_after_s=10.0))
            watch.add(RankFacts(node, 0, "CPU", log="/dev/null"), PulseReader(os.dup(pulse.fd)))
            exchange = Exchange(Board(store), watch, nnodes=count)
            for part in (exchange, watch, pulse):
                stack.callback(part.close)
            self.pulses.append(pulse)
            self.watches.append(watch)
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


def test_every_node_learns_how_far_the_foremost_ranks_are(make: Callable[[int], Nodes]) -> None:
    there = make(3)
    assert [exchange.front for exchange in there.exchanges] == [None] * 3
    for node, begun in enumerate((5, 9, 7)):
        there.pulses[node].beat(begun)
    there.talk()
    fronts = [exchange.front for exchange in there.exchanges]
    assert [front.collectives for front in fronts if isinstance(front, Front)] == [9, 9, 9]


def test_a_wish_on_any_node_reaches_all_ranks(make: Callable[[int], Nodes]) -> None:
    there = make(3)
    there.pulses[2].wish_to_stop(signal.SIGUSR1)
    there.talk()
    assert [pulse.asked_to_stop for pulse in there.pulses] == [signal.SIGUSR1] * 3
    there.exchanges[0].wish_to_stop(signal.SIGTERM)
    there.talk()
    assert [pulse.asked_to_stop for pulse in there.pulses] == [signal.SIGUSR1] * 3  # the first counts


def test_an_alarm_is_heard_by_all(make: Callable[[int], Nodes]) -> None:
    there = make(2)
    there.talk()
    assert there.exchanges[0].alarm is None
    there.exchanges[1].raise_alarm("rank 1 died")
    there.talk()
    assert [exchange.alarm for exchange in there.exchanges] == [{"node": 1, "cause": "rank 1 died"}] * 2


def test_node_0_gathers_what_all_state_and_gives_its_report_to_all(make: Callable[[int], Nodes]) -> None:
    there = make(2)
    given: list[Any] = []
    other = threading.Thread(
        target=lambda: given.append(there.exchanges[1].await_report({"node": 1}, cause="a rank failed"))
    )
    other.start()
    statements, silent = there.exchanges[0].gather({"node": 0}, cause="a rank failed")
    there.exchanges[0].publish({"first": 1})
    other.join()
    assert (statements, silent) == ([{"node": 0}, {"node": 1}], [])
    assert given == [{"first": 1}]


def test_a_node_that_says_nothing_is_named(make: Callable[[int], Nodes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_STATEMENTS_TIMEOUT_S", 0.3)
    monkeypatch.setattr(nodes, "_REPORT_TIMEOUT_S", 0.3)
    there = make(3)
    assert there.exchanges[0].gather({"node": 0}, cause="x") == ([{"node": 0}], [1, 2])
    assert there.exchanges[1].await_report({"node": 1}, cause="x") is None
    assert not there.exchanges[0].is_cut


def test_without_the_store_all_others_are_silent(make: Callable[[int], Nodes], monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(_board: Board, *_: object) -> None:
        raise dist.DistNetworkError("connection reset by peer")

    there = make(3)
    for name in ("pulse", "raise_alarm", "publish", "wish_to_stop"):
        monkeypatch.setattr(Board, name, gone)
    exchange = there.exchanges[0]
    exchange.step()
    assert exchange.is_cut
    exchange.step()  # nothing more is tried
    assert exchange.gather({"node": 0}, cause="x") == ([{"node": 0}], [1, 2])
    assert there.exchanges[1].await_report({"node": 1}, cause="x") is None
    exchange.publish({})
    exchange.raise_alarm("x")
    with pytest.raises(StoreGoneError):
        exchange.wish_to_stop(signal.SIGTERM)


def test_how_long_a_node_has_been_silent(make: Callable[[int], Nodes]) -> None:
    there = make(2)
    there.talk()
    there.exchanges[0].step()
    assert there.exchanges[0].silent_for(1) < 5.0
    time.sleep(0.2)
    for _ in range(2):  # of node 0 alone
        there.exchanges[0].step()
    assert there.exchanges[0].silent_for(1) >= 0.2
