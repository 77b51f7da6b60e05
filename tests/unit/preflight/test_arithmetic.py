"""Bandwidths, clocks and which link is slow."""

from __future__ import annotations

from typing import Any

import pytest

from framework.preflight.arithmetic import (
    Budget,
    Stamps,
    bus_factor,
    clock_offset,
    compared,
    grows,
    items,
    lateness,
    point,
    repetitions,
    sizes,
    slow_ends,
    slowest_device,
    slowest_link,
)


@pytest.mark.parametrize(("most", "last"), [(4, 4), (15, 4), (16, 16), (2**28, 2**28), (2**28 + 1, 2**28)])
def test_sizes_grow_by_four_up_to_the_greatest(most: int, last: int) -> None:
    found = sizes(most)
    assert found == [4**exponent for exponent in range(1, len(found) + 1)]
    assert found[-1] == last


def test_a_buffer_has_as_many_values_for_each_part() -> None:
    assert [items(size, parts=3) for size in (4, 12, 16, 64)] == [3, 3, 6, 18]
    assert [items(size) for size in (4, 6, 16)] == [1, 2, 4]


# nccl-tests, doc/PERFORMANCE.md
@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("all_reduce", 2 * 7 / 8),
        ("butterfly", 2 * 7 / 8),
        ("reduce_scatter", 7 / 8),
        ("all_gather", 7 / 8),
        ("all_to_all", 7 / 8),
        ("broadcast", 1.0),
        ("send/recv", 1.0),
    ],
)
def test_bandwidths_are_those_of_nccl_tests(name: str, factor: float) -> None:
    assert bus_factor(name, 8) == factor
    found = point(name, size_bytes=4000, seconds=0.5, repetitions=3, ranks=8, count=1000)
    assert found == {
        **{"size_bytes": 4000, "bytes": 4000, "repetitions": 3, "seconds": 0.5},
        **{"algorithm_bytes_per_s": 8000.0, "bus_bytes_per_s": 8000.0 * factor},
    }


def test_what_is_short_is_repeated() -> None:
    assert [repetitions(each, target_s=1.0) for each in (0.0, 1e-5, 0.1, 0.4, 1.0, 9.0)] == [100, 100, 10, 2, 1, 1]


def test_a_budget_is_shared_among_what_is_left() -> None:
    budget = Budget(6.0)
    assert budget.share(3) == 2.0
    budget.spend(1.0)
    assert budget.share(2) == 2.5
    budget.spend(9.0)
    assert budget.share(1) == 0.0


def test_the_clock_offset_is_that_of_the_fastest_round() -> None:
    """The other clock is 5 s ahead; the ways differ in the slow round, by which it alone would be 0.4 s wrong."""
    slow = Stamps(sent=100.0, received=105.9, answered=106.0, back=101.1)
    fast = Stamps(sent=200.0, received=205.01, answered=205.03, back=200.04)
    assert slow.delay_s == pytest.approx(1.0)
    offset, error = clock_offset([slow, fast])
    assert [offset, error] == pytest.approx([5.0, 0.01])
    assert clock_offset([slow])[0] == pytest.approx(5.4)
    assert abs(clock_offset([slow])[0] - 5.0) <= clock_offset([slow])[1]


def test_a_clock_behind_has_a_negative_offset() -> None:
    assert clock_offset([Stamps(100.0, 98.5, 98.5, 101.0)])[0] == pytest.approx(-2.0)


def link(one: int, other: int, bytes_per_s: float, *, within: bool = False) -> dict[str, Any]:
    said = {"ranks": [one, other], "nodes": [one, other], "is_within_node": within}
    return {**said, "compared_bytes_per_s": bytes_per_s}


def measured(one: int, other: int, *seconds: float) -> dict[str, Any]:
    """A link with a time for each of the sizes 1000, 4000, 16000, as far as there are some."""
    points = [{"bytes": 1000 * 4**number, "seconds": each} for number, each in enumerate(seconds)]
    return {"ranks": [one, other], "nodes": [one, other], "is_within_node": False, "points": points}


def test_links_are_compared_at_the_largest_size_that_all_of_their_kind_have_measured() -> None:
    """All are equally fast, and larger messages are faster: those that had time for them don't stand out for that."""
    links = [measured(0, 1, 1.0, 2.0, 4.0), measured(0, 2, 1.0), measured(1, 2, 1.0, 2.0), measured(3, 4, 1.0, 2.0)]
    links[3]["is_within_node"] = True
    found = compared(links)
    assert [(each["compared_bytes_per_s"], each["compared_bytes"]) for each in found] == [
        *((1000.0, 1000) for _ in range(3)),
        (2000.0, 4000),
    ]
    slow = slowest_link(found)
    assert slow is not None
    assert (slow["times_slower"], slow["stands_out"]) == (1.0, False)
    assert [(each["bytes_per_s"], each["bytes"]) for each in found] == [
        (4000.0, 16000),
        (1000.0, 1000),
        (2000.0, 4000),
        (2000.0, 4000),
    ]


def test_a_link_grows_as_long_as_there_is_time_and_until_more_than_the_way_is_measured() -> None:
    within: dict[str, Any] = {"trips": 3, "round_trip_s": 0.001, "limit_s": 1.0}
    assert grows(0.05, spent_s=0.39, **within)
    assert not grows(0.05, spent_s=0.41, **within)
    assert grows(0.009, spent_s=9.0, **within)
    assert not grows(0.01, spent_s=9.0, **within)


def test_the_slowest_link_has_its_factor() -> None:
    links = [link(0, 1, 800.0), link(0, 2, 1000.0), link(1, 2, 100.0)]
    slow = slowest_link(links)
    assert slow is not None
    assert (slow["ranks"], slow["times_slower"], slow["stands_out"]) == ([1, 2], 10.0, True)
    even = slowest_link([link(0, 1, 800.0), link(0, 2, 1000.0), link(1, 2, 900.0)])
    assert even is not None
    assert (even["ranks"], even["times_slower"], even["stands_out"]) == ([0, 1], 1.25, False)


def test_a_link_between_nodes_is_compared_with_its_like() -> None:
    within = [link(0, 1, 9000.0, within=True), link(2, 3, 4000.0, within=True)]
    between = [link(0, 2, 100.0), link(0, 3, 110.0), link(1, 2, 100.0)]
    slow = slowest_link([*within, *between])
    assert slow is not None
    assert (slow["ranks"], slow["times_slower"]) == ([2, 3], 2.25)
    alone = slowest_link([*within, between[0]])
    assert alone is not None
    assert alone["ranks"] == [2, 3]


def test_a_single_link_is_as_fast_as_itself() -> None:
    slow = slowest_link([link(0, 1, 7.0)])
    assert slow is not None
    assert (slow["times_slower"], slow["stands_out"]) == (1.0, False)
    assert slowest_link([]) is None


def test_a_node_all_of_whose_links_are_slow() -> None:
    assert slow_ends([link(0, 1, 1000.0), link(0, 2, 90.0), link(1, 2, 100.0)]) == [2]
    assert slow_ends([link(0, 1, 1000.0), link(0, 2, 900.0), link(1, 2, 100.0)]) == []
    # One link is slow, and another of its node isn't as fast as the third.
    assert slow_ends([link(0, 1, 400.0), link(0, 2, 1000.0), link(1, 2, 10.0)]) == []
    assert slow_ends([link(0, 1, 100.0)]) == []
    assert slow_ends([link(0, 1, 10.0, within=True), link(0, 2, 1.0, within=True)]) == []


def test_the_slowest_device() -> None:
    ranks = [
        {"rank": rank, "matmul": [{"device": f"cuda:{rank}", "flops_per_s": speed}]}
        for rank, speed in enumerate((9.0, 3.0, 8.0))
    ]
    slow = slowest_device(ranks)
    assert slow == {"rank": 1, "device": "cuda:1", "flops_per_s": 3.0, "times_slower": 3.0, "stands_out": True}
    alone = slowest_device(ranks[:1])
    assert alone is not None
    assert alone["times_slower"] == 1.0
    assert slowest_device([{"rank": 0, "matmul": []}]) is None


def test_who_waits_least_came_last() -> None:
    waits = [[5.0, 0.1, 5.0], [3.0, 3.0, 3.0], [1.0, 1.0, 1.0]]
    assert lateness(waits) == [0.0, 2.0, 4.0]
    assert lateness([[0.5, 0.5]]) == [0.0]
