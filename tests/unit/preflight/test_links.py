"""The measuring of links on ranks that are threads: who measures what, when it ends, and what is in its time."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from queue import Queue
from typing import Any, cast

import pytest
from torch import Tensor

from framework.distributed.context import Context
from framework.preflight import links
from framework.preflight.lines import Lines
from framework.preflight.lines import pattern as real_pattern
from framework.topology import Topology
from tests.unit.simulated_ranks import CPU, SimulatedRanks

DEADLINE_S = 20.0


class Wires:
    """What is between the threads: a queue for each way."""

    def __init__(self, ranks: int) -> None:
        self._queues: dict[tuple[int, int], Queue[Tensor]] = {
            (one, other): Queue() for one in range(ranks) for other in range(ranks)
        }

    def send(self, values: Tensor, way: tuple[int, int]) -> None:
        self._queues[way].put(values.clone())

    def receive(self, values: Tensor, way: tuple[int, int]) -> None:
        values.copy_(self._queues[way].get(timeout=DEADLINE_S))


@dataclass(frozen=True)
class ThreadLines:
    """As `Lines` are to the rank of a thread."""

    context: Context
    wires: Wires
    pair_device = CPU

    @property
    def rank(self) -> int:
        return self.context.rank

    @property
    def ranks(self) -> int:
        return self.context.world_size

    def send(self, values: Tensor, to: int) -> None:
        self.wires.send(values, (self.rank, to))

    def receive(self, values: Tensor, source: int) -> None:
        self.wires.receive(values, (source, self.rank))


class Clock:
    """Only moves where something is done that takes time; each rank's may be ahead by so much."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of_thread = threading.local()
        self.ahead_s: list[float] = []
        self.now_s = 0.0

    def be_of(self, rank: int) -> None:
        self._of_thread.rank = rank

    def pass_by(self, seconds: float) -> None:
        with self._lock:
            self.now_s += seconds

    def perf_counter(self) -> float:
        return self.now_s

    def time(self) -> float:
        return self.now_s + (self.ahead_s[self._of_thread.rank] if self.ahead_s else 0.0)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(links, "time", made)
    return made


def measured(
    nnodes: int, procs: int, monkeypatch: pytest.MonkeyPatch, *, max_bytes: int = 1024, seconds: float = 0.0
) -> list[links.Found]:
    """What `measure_links` gives each rank."""
    ranks, wires = SimulatedRanks(nnodes * procs), Wires(nnodes * procs)
    monkeypatch.setattr(
        links, "greatest", lambda values, context: list(map(max, zip(*ranks.gather(values, context), strict=True)))
    )
    monkeypatch.setattr(links, "barrier", lambda context: ranks.gather(None, context))

    def measure(own: Context) -> links.Found:
        links.time.be_of(own.rank)  # type: ignore[attr-defined]
        context = Context(Topology(nnodes, procs, 0, 1), own.rank, own.rank % procs, own.rank // procs, (CPU,), "gloo")
        lines = cast(Lines, ThreadLines(context, wires))
        return links.measure_links(lines, max_bytes=max_bytes, seconds=seconds)

    found = ranks.run(measure)
    assert all(isinstance(each, links.Found) for each in found), found
    return cast(list[links.Found], found)


def all_links(found: list[links.Found]) -> list[dict[str, Any]]:
    return sorted((link for each in found for link in each.links), key=lambda link: link["ranks"])


def test_each_link_is_measured_once_and_clocks_are_those_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(3, 2, monkeypatch)
    within, between = [[0, 1], [2, 3], [4, 5]], [[0, 2], [0, 4], [1, 3], [1, 5], [2, 4], [3, 5]]
    assert [link["ranks"] for link in all_links(found)] == sorted(within + between)
    assert all(len(link["round_trips_s"]) == links.ROUNDS for link in all_links(found))
    assert [each.faults for each in found] == [[] for _ in found]
    assert max(len(each.links) for each in found) <= 3


def test_clocks_are_told_from_node_to_node(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """Node n's is n seconds ahead, and stands still otherwise: so nothing is wrong with what is found."""
    clock.ahead_s = [0.0, 1.0, 2.0, 3.0, 4.0]
    found = measured(5, 1, monkeypatch)
    assert [each.clock["ahead_s"] for each in found] == clock.ahead_s
    assert [each.clock["error_s"] for each in found] == [0.0] * 5


def test_links_are_left_out_where_time_is_over_but_for_the_first(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """Of 28 pairs of a node; with no time, and with time for as many again."""
    monkeypatch.setattr(ThreadLines, "receive", _taking(0.001, clock))
    assert len(all_links(measured(1, 8, monkeypatch))) == links.SURELY
    one_s = clock.now_s / links.SURELY
    assert links.SURELY < len(all_links(measured(1, 8, monkeypatch, seconds=2 * links.SURELY * one_s))) < 28
    assert len(all_links(measured(1, 8, monkeypatch, seconds=100 * one_s))) == 28


def test_the_making_of_buffers_is_in_no_links_time(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """It takes 100 s on either side, and the way 1 s: a round trip is 2 s."""
    monkeypatch.setattr(ThreadLines, "receive", _taking(1.0, clock))

    def slow_pattern(*arguments: Any, **named: Any) -> Tensor:
        time.sleep(0.05)  # what the other side can do meanwhile, it does
        clock.pass_by(100.0)
        return real_pattern(*arguments, **named)

    monkeypatch.setattr(links, "pattern", slow_pattern)
    (link,) = all_links(measured(1, 2, monkeypatch, max_bytes=65536, seconds=1e6))
    assert link["points"] == [{"bytes": 65536, "seconds": 1.0}]
    assert link["latency_s"] == 1.0


def _taking(seconds: float, clock: Clock) -> Any:
    real = ThreadLines.receive

    def receive(self: ThreadLines, values: Tensor, source: int) -> None:
        real(self, values, source)
        clock.pass_by(seconds)

    return receive


def test_a_slow_link_ends_its_growth_and_the_others_dont(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """The time is that of what is carried; between ranks 1 and 2 it takes 1000 times as long."""
    real = ThreadLines.receive

    def receive(self: ThreadLines, values: Tensor, source: int) -> None:
        real(self, values, source)
        clock.pass_by(values.numel() * (1e-6 if {self.rank, source} == {1, 2} else 1e-9))

    monkeypatch.setattr(ThreadLines, "receive", receive)
    found = all_links(measured(1, 3, monkeypatch, max_bytes=2**20, seconds=0.3))
    sizes = {tuple(link["ranks"]): [point["bytes"] for point in link["points"]] for link in found}
    assert sizes == {(0, 1): [2**16, 2**18, 2**20], (0, 2): [2**16, 2**18, 2**20], (1, 2): [2**16]}
