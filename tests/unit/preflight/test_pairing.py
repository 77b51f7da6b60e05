"""Who is measured with whom at the same time."""

from __future__ import annotations

from collections import Counter
from itertools import chain, combinations, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.preflight.pairing import Pair, doublings, kinds, leader, rounds


def nodes_of(pairs: list[Pair], procs: int) -> list[tuple[int, int]]:
    return [(one // procs, other // procs) for one, other in pairs]


@given(st.integers(0, 40))
def test_in_rounds_each_meets_each_other_once(number: int) -> None:
    found = list(rounds(number))
    assert sorted(chain(*found)) == list(combinations(range(number), 2))
    for each in found:
        met = list(chain(*each))
        assert len(met) == len(set(met)) == number - number % 2


def test_the_circle_of_four_and_of_three() -> None:
    assert list(rounds(4)) == [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    assert list(rounds(3)) == [[(1, 2)], [(0, 2)], [(0, 1)]]


@pytest.mark.parametrize(("nnodes", "procs"), [(1, 1), (1, 2), (1, 5), (2, 1), (2, 3), (3, 1), (4, 2), (5, 3)])
def test_every_link_comes_once_and_none_disturbs_another(nnodes: int, procs: int) -> None:
    found = {kind.is_within_node: kind for kind in kinds(nnodes, procs)}
    assert set(found) == ({True} if procs > 1 else set()) | ({False} if nnodes > 1 else set())
    for is_within, kind in found.items():
        steps = list(kind.steps())
        links = list(chain(*steps))
        assert (len(steps), len(links)) == (kind.num_steps, kind.num_links)
        assert len(set(links)) == len(links)
        assert all(one < other for one, other in links)
        for step in steps:
            touched = [set(nodes) for nodes in nodes_of(step, procs)]
            assert all(len(nodes) == (1 if is_within else 2) for nodes in touched)
            assert sum(map(len, touched)) == len(set[int]().union(*touched))  # each node is in one pair at most
        if not is_within:
            assert all(one % procs == other % procs for one, other in links)
            assert kind.num_links == procs * nnodes * (nnodes - 1) // 2
        else:
            assert kind.num_links == nnodes * procs * (procs - 1) // 2


def test_whenever_it_ends_all_nodes_have_had_as_many_links_and_all_local_ranks_are_used_early() -> None:
    nnodes, procs = 9, 4
    (between,) = (kind for kind in kinds(nnodes, procs) if not kind.is_within_node)
    for taken in range(1, between.num_steps):
        links = list(chain(*islice(between.steps(), taken)))
        counted = Counter(chain(*nodes_of(links, procs)))
        assert max(counted.values()) - min(counted[node] for node in range(nnodes)) <= 1
        assert len({rank % procs for rank in chain(*links)}) == min(taken, procs)


def test_the_list_of_what_was_found_is_shared_out() -> None:
    """Rank 0 would have all of its own, if the lower one kept them."""
    kept = Counter(leader(pair) for pair in combinations(range(100), 2))
    assert set(kept) == set(range(100))
    assert max(kept.values()) <= 50
    assert all(leader(pair) in pair for pair in combinations(range(10), 2))


@pytest.mark.parametrize("number", [1, 2, 3, 8, 11, 1000])
def test_all_are_reached_from_the_first_in_few_steps(number: int) -> None:
    reached, steps = {0}, list(doublings(number))
    for step in steps:
        assert {one for one, _ in step} <= reached
        assert len(set(chain(*step))) == 2 * len(step)
        reached |= {other for _, other in step}
    assert reached == set(range(number))
    assert len(steps) == (number - 1).bit_length()
