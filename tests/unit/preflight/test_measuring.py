"""Sizes, times and clocks, who is measured with whom, and by which values a mistake is seen."""

from __future__ import annotations

import time
from collections import Counter
from itertools import chain, combinations, islice
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from framework.distributed.context import Context
from framework.preflight.arithmetic import Stamps, clock_offset, compared, lateness
from framework.preflight.facts import data_root
from framework.preflight.lines import difference, open_lines, pattern, pattern_sum
from framework.preflight.links import measure_links
from framework.preflight.pairing import doublings, kinds
from framework.topology import Topology
from tests.helpers.rank_pool import RankPool

CPU = torch.device("cpu")


def test_the_clock_offset_is_that_of_the_fastest_round() -> None:
    """The other clock is 5 s ahead; the ways differ in the slow round, by which it alone would be 0.4 s wrong."""
    slow = Stamps(sent=100.0, received=105.9, answered=106.0, back=101.1)
    fast = Stamps(sent=200.0, received=205.01, answered=205.03, back=200.04)
    assert clock_offset([slow, fast]) == pytest.approx((5.0, 0.01))
    assert clock_offset([slow]) == pytest.approx((5.4, 0.5))
    assert clock_offset([Stamps(100.0, 98.5, 98.5, 101.0)])[0] == pytest.approx(-2.0)


def test_who_waits_least_came_last() -> None:
    assert lateness([[5.0, 0.1, 5.0], [3.0, 3.0, 3.0], [1.0, 1.0, 1.0]]) == [0.0, 2.0, 4.0]


def test_links_are_compared_at_the_largest_size_that_all_of_their_kind_have() -> None:
    """All are equally fast, and larger messages are faster: those that had time for them don't stand out for that."""
    times = [(1.0, 2.0, 4.0), (1.0,), (1.0, 2.0), (1.0, 2.0)]  # of 1000, 4000 and 16000 bytes
    links: list[dict[str, Any]] = [
        {
            "is_within_node": number == 3,
            "points": [{"bytes": 1000 * 4**place, "seconds": each} for place, each in enumerate(own)],
        }
        for number, own in enumerate(times)
    ]
    found = compared(links)
    assert [each["compared_bytes_per_s"] for each in found] == [1000.0, 1000.0, 1000.0, 2000.0]
    assert [each["compared_bytes"] for each in found] == [1000, 1000, 1000, 4000]
    assert [each["bytes_per_s"] for each in found] == [4000.0, 1000.0, 2000.0, 2000.0]


def clocks_of_nodes(context: Context) -> tuple[list[list[int]], list[str], dict[str, float]]:
    """As if each rank were a node whose clock is 5 s ahead of the one before."""
    world_size, rank, real = context.world_size, context.rank, time.time
    node = Context(Topology(world_size, 1, 0, 1), rank, 0, rank, context.devices, context.backend)

    def ahead() -> float:
        return real() + 5.0 * rank

    with mock.patch("time.time", ahead), open_lines(node, timeout_s=60.0) as lines:
        found = measure_links(lines, max_bytes=1024, seconds=0.1)
    return [link["ranks"] for link in found.links], found.faults, found.clock


def test_links_are_measured_once_and_clocks_compared_from_node_to_node(rank_pool: RankPool) -> None:
    answers = rank_pool.run(clocks_of_nodes, ranks=3)
    assert sorted(link for links, _, _ in answers for link in links) == [[0, 1], [0, 2], [1, 2]]
    for rank, (_, faults, clock) in enumerate(answers):
        assert faults == []
        assert abs(clock["ahead_s"] - 5.0 * rank) <= clock["error_s"] + 0.001


# Pairs


@pytest.mark.parametrize(("nnodes", "procs"), [(1, 1), (1, 2), (1, 5), (2, 1), (2, 3), (3, 1), (4, 2), (5, 3), (9, 4)])
def test_every_link_is_measured_once_and_none_disturbs_another(nnodes: int, procs: int) -> None:
    found = {kind.is_within_node: kind for kind in kinds(nnodes, procs)}
    assert set(found) == ({True} if procs > 1 else set()) | ({False} if nnodes > 1 else set())
    all_pairs = list(combinations(range(nnodes * procs), 2))
    for is_within, kind in found.items():
        steps = list(kind.steps())
        expected = [
            (one, other)
            for one, other in all_pairs
            if (one // procs == other // procs if is_within else one % procs == other % procs)
        ]
        assert sorted(chain(*steps)) == expected
        assert (len(steps), len(expected)) == (kind.num_steps, kind.num_links)
        for step in steps:
            nodes = Counter(node for one, other in step for node in {one // procs, other // procs})
            assert set(nodes.values()) == {1}  # nobody shares a node's memory or card


def test_whenever_time_ends_all_nodes_have_had_as_many_links_by_all_their_cards() -> None:
    nnodes, procs = 9, 4
    (between,) = (kind for kind in kinds(nnodes, procs) if not kind.is_within_node)
    for taken in range(1, between.num_steps):
        links = list(chain(*islice(between.steps(), taken)))
        counted = Counter(rank // procs for rank in chain(*links))
        assert max(counted.values()) - min(counted[node] for node in range(nnodes)) <= 1
        assert len({rank % procs for rank in chain(*links)}) == min(taken, procs)


@pytest.mark.parametrize("number", [1, 2, 3, 8, 11, 1000])
def test_all_are_reached_from_the_first_in_few_steps(number: int) -> None:
    reached, steps = {0}, list(doublings(number))
    for step in steps:
        assert {one for one, _ in step} <= reached
        assert len(set(chain(*step))) == 2 * len(step)
        reached |= {other for _, other in step}
    assert reached == set(range(number))
    assert len(steps) == (number - 1).bit_length()


# Values and words


def test_every_rank_and_every_place_has_its_value() -> None:
    whole = pattern(3, 2500, device=CPU)
    assert torch.equal(whole, whole.round())  # sums are exact
    assert torch.equal(pattern(3, 50, device=CPU, begin=2450), whole[2450:])
    ranks = torch.stack([pattern(rank, 75, device=CPU)[5:] for rank in range(3)])
    assert torch.equal(pattern_sum(3, 70, device=CPU, begin=5), ranks.sum(dim=0))
    assert len({tuple(pattern(rank, 4, device=CPU).tolist()) for rank in range(256)}) == 256
    for block in (1, 2, 3, 4, 64, 1024, 2048):
        assert not torch.equal(whole[:32], whole.roll(block)[:32])


def test_wrong_values_are_counted_and_the_first_is_shown() -> None:
    expected = torch.arange(2000.0)
    assert difference(expected.clone(), expected) is None
    wrong = expected.clone()
    wrong[[7, 1500]] = torch.tensor([0.5, float("nan")])
    assert difference(wrong, expected) == "2 of 2,000 values are wrong; number 7 is 0.5 instead of 7"


def test_the_state_of_the_data_root(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    states = [data_root(str(tmp_path / name)) for name in ("", "file", "none")]
    assert [state and state["state"] for state in states] == ["there", "not readable", "missing"]
