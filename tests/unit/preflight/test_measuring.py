"""Clock offsets, who is measured with whom, and how a wrong value is seen."""

from __future__ import annotations

import time
from collections import Counter
from itertools import chain, combinations
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.helpers.internals import (
    Barrier,
    Context,
    Peers,
    Topology,
    clock_offsets,
    connect_peers,
    data_root,
    link_rounds,
    measure_links,
    sent_values,
    time_barriers,
)
from tests.helpers.rank_pool import RankPool

CPU = torch.device("cpu")


def test_the_shortest_barrier_gives_the_clock_offset() -> None:
    """The other clock is 5 s ahead; in the second barrier one rank was held up for 0.4 s after it."""
    of_rank_0 = [Barrier(wait_s=0.2, left_at_s=100.0), Barrier(wait_s=0.5, left_at_s=200.4)]
    of_rank_1 = [Barrier(wait_s=0.1, left_at_s=105.1), Barrier(wait_s=0.1, left_at_s=205.0)]
    first, second = clock_offsets([of_rank_0, of_rank_1])
    assert first["ahead_s"] == 0.0
    assert (second["ahead_s"], second["error_s"]) == pytest.approx((5.1, 0.2))


def measure_nodes(context: Context) -> tuple[list[list[int]], list[str], list[Barrier]]:
    """Measure as if each rank were a node whose clock is 5 s ahead of the one before."""
    world_size = context.world_size
    rank = context.rank
    real = time.time
    node = Context(Topology(world_size, 1, 0, 1), rank, 0, rank, context.devices, context.backend)

    def ahead() -> float:
        return real() + 5.0 * rank

    with mock.patch("time.time", ahead), connect_peers(node, timeout_s=60.0) as peers:
        barriers = time_barriers(peers)
        links = measure_links(peers, max_bytes=1024, seconds=0.1)
    return [link["ranks"] for link in links], [fault["text"] for fault in peers.faults], barriers


@pytest.mark.multiproc
def test_every_link_and_clock_is_measured(rank_pool: RankPool) -> None:
    links, faults, barriers = zip(*rank_pool.run(measure_nodes, ranks=4), strict=True)
    assert sorted(chain(*links)) == [list(each) for each in combinations(range(4), 2)]
    assert not any(faults)
    for rank, clock in enumerate(clock_offsets(barriers)):
        assert abs(clock["ahead_s"] - 5.0 * rank) <= clock["error_s"] + 0.001


@pytest.mark.parametrize(("nnodes", "procs"), [(1, 1), (1, 5), (2, 1), (2, 3), (3, 1), (4, 2), (5, 3)])
def test_links_are_measured_once_without_interference(nnodes: int, procs: int) -> None:
    for is_within, rounds in zip((True, False), link_rounds(nnodes, procs), strict=True):
        expected = []
        for one, other in combinations(range(nnodes * procs), 2):
            is_measured = one // procs == other // procs if is_within else one % procs == other % procs
            if is_measured:
                expected.append((one, other))
        assert sorted(chain(*rounds)) == expected
        for pairs in rounds:
            uses_of_nodes: Counter[int] = Counter()
            for one, other in pairs:
                uses_of_nodes.update({one // procs, other // procs})
            # No two pairs share a node's memory or card.
            assert set(uses_of_nodes.values()) == {1}


def test_ending_early_measures_all_nodes_equally() -> None:
    nnodes = 9
    procs = 4
    _, between = link_rounds(nnodes, procs)
    for taken in range(1, len(between)):
        links = list(chain(*between[:taken]))
        counted = Counter(rank // procs for rank in chain(*links))
        assert max(counted.values()) - min(counted[node] for node in range(nnodes)) <= 1
        assert len({rank % procs for rank in chain(*links)}) == min(taken, procs)


def test_every_rank_and_every_place_has_its_value() -> None:
    whole = sent_values([3], 2500, device=CPU)
    # Sums of whole numbers are exact.
    assert torch.equal(whole, whole.round())
    assert torch.equal(sent_values([3], 50, device=CPU, begin=2450), whole[2450:])
    ranks = torch.stack([sent_values([rank], 75, device=CPU)[5:] for rank in range(3)])
    assert torch.equal(sent_values(range(3), 70, device=CPU, begin=5), ranks.sum(dim=0))
    assert len({tuple(sent_values([rank], 4, device=CPU).tolist()) for rank in range(256)}) == 256
    for block in (1, 2, 3, 4, 64, 1024, 2048):
        assert not torch.equal(whole[:32], whole.roll(block)[:32])


def test_wrong_values_are_counted_and_shown() -> None:
    peers = Peers(Context(Topology(1, 1, 0, 1), 0, 0, 0, (CPU,), "gloo"), None, CPU)
    expected = torch.arange(2000.0)
    peers.compare(expected.clone(), expected, label="")
    assert peers.faults == []
    wrong = expected.clone()
    wrong[[7, 1500]] = torch.tensor([0.5, float("nan")])
    with peers.check("broadcast"):
        peers.compare(wrong, expected, label="")
    text = "2 of 2,000 values are wrong; number 7 is 0.5 instead of 7"
    assert peers.faults == [{"check": "broadcast", "rank": 0, "text": text}]


def test_the_state_of_the_data_root(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    states = [data_root(str(tmp_path / name)) for name in ("", "file", "none")]
    assert [state and state["state"] for state in states] == ["there", "not readable", "missing"]
