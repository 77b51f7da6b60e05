"""What of the facts that a preflight finds fails it, is noted, and is named as slow; two nodes with two ranks each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.helpers.internals import BETWEEN, WITHIN, assess_preflight, parse, render_preflight
from tests.unit.config.raw import raw_config

# Importing rich draws a random number.
pytestmark = pytest.mark.usefixtures("own_state")

NODES = (0, 0, 1, 1)
PAIRS = ((0, 1), (0, 2), (1, 3), (2, 3))


def link(one: int, other: int, *, nodes: tuple[int, ...] = NODES, **changes: Any) -> dict[str, Any]:
    ends = [nodes[one], nodes[other]]
    return {
        "ranks": [one, other],
        "nodes": ends,
        "kind": WITHIN if ends[0] == ends[1] else BETWEEN,
        "bytes_per_s": 1e9,
        "bytes": 2**22,
        "latency_s": 1e-4,
        "round_trips_s": [2e-4] * 10,
        **changes,
    }


def rank(number: int, **changes: Any) -> dict[str, Any]:
    host = f"host{NODES[number] + 1}"
    facts = {"rank": number, "name": f"rank {number} ({host})", "node": NODES[number], "host": host}
    machine = {"free_disk_bytes": 50 * 10**9, "free_shm_bytes": 2 * 10**9, "data_root": None, "interconnect": None}
    own = {
        "local_rank": number % 2,
        "clock": {"ahead_s": 0.0, "error_s": 1e-4},
        "matmul": [{"device": "cpu", "flops_per_s": 4e10}],
    }
    waited = {"barrier_s": 1e-4}
    versions = {"python": "3.11.2", "torch": "2.15", "framework": "1"}
    devices = [{"device": "cpu", "name": "A processor"}]
    return {**facts, **machine, **own, **waited, "devices": devices, "versions": versions, **changes}


def with_ranks(changes: dict[str, Any], *which: int) -> dict[str, Any]:
    ranks = [rank(number) for number in range(4)]
    for number in which:
        ranks[number] = rank(number, **changes)
    return {"ranks": ranks}


def with_link(**changes: Any) -> dict[str, Any]:
    """Return links of which the one between ranks 1 and 3 is changed."""
    links = {pair: link(*pair) for pair in PAIRS}
    links[1, 3] = link(1, 3, **changes)
    return {"links": list(links.values())}


def check(name: str, *, bus: float = 5e8) -> dict[str, Any]:
    points = [
        {"size_bytes": size, "seconds": 1e-3, "bus_bytes_per_s": bus * share}
        for size, share in ((4, 0.01), (4096, 1.0), (16384, 0.5))
    ]
    return {"name": name, "points": points}


def assessed(given: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """All that preflight.json has, for what was found and keys of `preflight`."""
    found = {
        "recipe": "toy",
        "backend": "gloo",
        "seconds": 20.0,
        "took_s": 1.25,
        "ranks": [rank(number) for number in range(4)],
        "links": [link(*pair) for pair in PAIRS],
        "num_links": {WITHIN: 2, BETWEEN: 2},
        "checks": [check("broadcast"), check("all_reduce")],
        "faults": [],
        "max_bytes": 16384,
        **given,
    }
    limits = {f"preflight.{key}": value for key, value in keys.items()}
    settings = parse(raw_config({"preflight.max_bytes": 16384, **limits})).preflight
    return {**found, **assess_preflight(found, settings)}


GENEROUS = {
    "min_matmul": 39,
    "min_free_disk": 49,
    "min_shm": 1.9,
    "min_bus_bandwidth": 499,
    "max_latency": 0.001,
    "min_link_bandwidth": 999,
    "max_clock_offset": 0.1,
}


@pytest.mark.parametrize("keys", [{}, GENEROUS])
def test_a_healthy_cluster_passes(keys: dict[str, Any]) -> None:
    result = assessed({}, **keys)
    assert (result["passed"], result["failures"], result["notes"]) == (True, [], [])


@dataclass(frozen=True, kw_only=True)
class Failing:
    """What a preflight finds, keys of `preflight` that it fails, and what is said of it."""

    found: dict[str, Any]
    keys: dict[str, Any] = field(default_factory=dict)
    check: str
    says: list[str]


@pytest.mark.parametrize(
    "case",
    [
        Failing(
            found={"faults": [{"check": "all_gather", "rank": 2, "text": "wrong"}]},
            check="all_gather",
            says=["rank 2 (host2): wrong"],
        ),
        Failing(
            found=with_ranks({"clock": {"ahead_s": -3.5, "error_s": 0.1}}, 3),
            keys={"max_clock_offset": 2},
            check="clocks",
            says=["rank 3 (host2): 3.4 s", "preflight.max_clock_offset allows 2 s at most"],
        ),
        Failing(
            found=with_ranks({"matmul": [{"device": "cuda:1", "flops_per_s": 2e10}]}, 3),
            keys={"min_matmul": 30},
            check="matmul",
            says=["rank 3 (host2) on cuda:1: 20 GFLOP/s", "min_matmul allows 30 GFLOP/s at least"],
        ),
        Failing(
            found=with_ranks({"free_disk_bytes": 10**9}, 2, 3),
            keys={"min_free_disk": 1.5},
            check="free_disk",
            says=["node 1, host2: 1 GB", "min_free_disk allows 1.5 GB at least"],
        ),
        Failing(
            found=with_ranks({"free_shm_bytes": None}, 2, 3),
            keys={"min_shm": 1},
            check="shm",
            says=["node 1, host2: unknown"],
        ),
        Failing(
            found=with_link(latency_s=0.02),
            keys={"max_latency": "0.01s"},
            check="latency",
            says=["rank 1 (host1) – rank 3 (host2): 0.02 s", "max_latency allows 0.01 s at most"],
        ),
        Failing(
            found=with_link(bytes_per_s=12.3e6),
            keys={"min_link_bandwidth": 100},
            check="link bandwidth",
            says=["rank 1 (host1) – rank 3 (host2): 12.3 MB/s", "allows 100 MB/s at least"],
        ),
        Failing(
            found={"checks": [check("broadcast"), check("all_reduce", bus=2e8)]},
            keys={"min_bus_bandwidth": 201},
            check="bus bandwidth",
            says=["all_reduce: 200 MB/s", "min_bus_bandwidth allows 201 MB/s"],
        ),
        Failing(
            found=with_ranks({"data_root": {"path": "/d", "state": "not readable"}}, 0, 1),
            check="data root",
            says=["/d is not readable on node 0, host1"],
        ),
    ],
    ids=lambda case: case.check,
)
def test_failures_name_place_value_and_limit(case: Failing) -> None:
    result = assessed(case.found, **case.keys)
    assert not result["passed"]
    (failure,) = result["failures"]
    assert failure["check"] == case.check
    for text in case.says:
        assert text in failure["text"]
    if case.keys:
        # Without the limit, nothing is wrong.
        assert assessed(case.found, **dict.fromkeys(case.keys))["passed"]


def test_a_data_folder_may_be_missing_everywhere() -> None:
    def roots(*states: str) -> dict[str, Any]:
        return {
            "ranks": [rank(number, data_root={"path": "/d", "state": states[NODES[number]]}) for number in range(4)]
        }

    assert assessed(roots("there", "there"))["passed"]
    # The data may still be downloaded.
    assert assessed(roots("missing", "missing"))["passed"]
    (failure,) = assessed(roots("there", "missing"))["failures"]
    assert "/d is missing on node 1, host2" in failure["text"]


def test_a_clock_within_measurement_error_passes() -> None:
    given = with_ranks({"clock": {"ahead_s": 1.2, "error_s": 0.3}}, 1)
    assert [assessed(given, max_clock_offset=limit)["passed"] for limit in (1, 0.8)] == [True, False]


def test_what_was_left_out_is_noted() -> None:
    result = assessed({"max_bytes": 4096, "num_links": {WITHIN: 2, BETWEEN: 1234}})
    assert "2 of 1,234 links" in render_preflight(result)
    (note,) = result["notes"]
    assert "nothing above 4 KiB" in note


# Which is slow


def links_at(*rates: float, nodes: tuple[int, ...] = (0, 1, 2)) -> dict[str, Any]:
    """Return links between ranks 0 and 1, 0 and 2, 1 and 2, one for each rate."""
    ranks = [rank(number, node=node, host=f"host{node + 1}") for number, node in enumerate(nodes)]
    pairs = [(0, 1), (0, 2), (1, 2)][: len(rates)]
    links = [link(*pair, nodes=nodes, bytes_per_s=speed) for pair, speed in zip(pairs, rates, strict=True)]
    return {"ranks": ranks, "links": links}


@dataclass(frozen=True, kw_only=True)
class Slowest:
    """Measured links, the slowest, and how many times slower than its kind it is."""

    given: dict[str, Any]
    ranks: list[int]
    times: float
    stands_out: bool = False


@pytest.mark.parametrize(
    "case",
    [
        Slowest(given=links_at(800.0, 1000.0, 100.0), ranks=[1, 2], times=8.0, stands_out=True),
        Slowest(given=links_at(800.0, 1000.0, 900.0), ranks=[0, 1], times=1.125),
        # A single fast link makes none of the others slow.
        Slowest(given=links_at(374.0, 417.0, 3065.0), ranks=[0, 1], times=417 / 374),
        Slowest(given=links_at(1000.0, 90.0, 100.0), ranks=[0, 2], times=100 / 90),
        Slowest(given=links_at(400.0, 1000.0, 10.0), ranks=[1, 2], times=40.0, stands_out=True),
        Slowest(given=links_at(1000.0, 100.0), ranks=[0, 2], times=5.5, stands_out=True),
        Slowest(given=links_at(7.0), ranks=[0, 1], times=1.0),
        # Those within a node are compared among themselves.
        Slowest(given=links_at(9000.0, 4000.0, 100.0, nodes=(0, 0, 0)), ranks=[1, 2], times=40.0, stands_out=True),
        Slowest(
            given={"links": [*links_at(9000.0, nodes=(0, 0, 1))["links"], *links_at(100.0)["links"]]},
            ranks=[0, 1],
            times=1.0,
        ),
    ],
)
def test_the_slowest_link_compared_with_its_kind(case: Slowest) -> None:
    slow = assessed(case.given)["slowest_link"]
    assert (slow["ranks"], slow["stands_out"]) == (case.ranks, case.stands_out)
    assert slow["times_slower"] == pytest.approx(case.times)


def test_the_shown_median_is_the_compared_one() -> None:
    given = links_at(374e6, 417e6, 3065e6)
    page = render_preflight(assessed({**given, "num_links": {WITHIN: 0, BETWEEN: 3}}))
    assert "median 100 µs one way, 417 MB/s at 4 MiB" in page
    assert "374 MB/s, 1.1 times slower than the median between nodes\n" in page


def test_the_slowest_device() -> None:
    speeds = (9e9, 3e9, 8e9, 9e9)
    ranks = [rank(number, matmul=[{"device": "cpu", "flops_per_s": speed}]) for number, speed in enumerate(speeds)]
    result = assessed({"ranks": ranks})
    assert result["slowest_device"] == {
        "rank": 1,
        "device": "cpu",
        "flops_per_s": 3e9,
        "times_slower": 8.5 / 3,
        "stands_out": True,
    }
    alone = assessed({"ranks": [rank(0)], "links": [], "checks": []})
    assert (alone["slowest_device"]["times_slower"], alone["slowest_link"]) == (1.0, None)
