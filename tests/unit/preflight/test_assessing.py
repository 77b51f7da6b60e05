"""What fails a preflight, what is only noted, and how it is said."""

from __future__ import annotations

from typing import Any

import pytest

from framework.config.parse import parse
from framework.config.schema import PreflightConfig
from framework.preflight.arithmetic import slowest_link
from framework.preflight.assessing import assess
from framework.preflight.wording import amount, device_line, flops, link_line, rate, seconds_text, verdict
from tests.unit.config.raw import raw_config
from tests.unit.preflight.found import PAIRS, STUCK, check, found, link, rank


def settings(**keys: Any) -> PreflightConfig:
    return parse(raw_config({f"preflight.{key}": value for key, value in keys.items()})).preflight


def failures(given: dict[str, Any], **keys: Any) -> list[tuple[str, str]]:
    answer = assess(given, settings(**keys))
    assert answer["passed"] == (not answer["failures"])
    return [(each["check"], each["text"]) for each in answer["failures"]]


def test_all_is_well() -> None:
    assert failures(found()) == []
    assert failures(found(), min_matmul=39, min_free_disk=49, min_shm=1.9, min_bus_bandwidth=499) == []
    assert failures(found(), max_latency=0.001, min_link_bandwidth=999) == []


def test_a_wrong_value_always_fails() -> None:
    fault = {"check": "all_gather", "rank": 2, "text": "of 4,096 bytes, 1 of 1,024 values are wrong"}
    assert failures(found(faults=[fault]), max_clock_offset=None) == [
        ("all_gather", "wrong values on rank 2: of 4,096 bytes, 1 of 1,024 values are wrong")
    ]


def test_a_receive_that_holds_its_rank_up_fails() -> None:
    ranks = [rank(0), rank(1), rank(2), rank(3, late_sender=STUCK)]
    assert failures(found(ranks=ranks)) == [
        (
            "isend/irecv",
            "irecv held rank 3 (host2) up for 20 s, until rank 2 (host2) sent without its word: "
            "nothing goes on beside a receive",
        )
    ]


def test_a_rank_out_of_its_turn_fails() -> None:
    fault = {"check": "barrier", "rank": 1, "text": "its turn was number 3, and number 2 belongs to it"}
    said = "not in order on rank 1: its turn was number 3, and number 2 belongs to it"
    assert failures(found(faults=[fault])) == [("barrier", said)]


@pytest.mark.parametrize(
    ("keys", "changed", "check_name", "said"),
    [
        (
            {"max_clock_offset": 2},
            {"clock": {"ahead_s": -3.5, "error_s": 0.1}},
            "clocks",
            "the clock of rank 3 (node 1, host2) is 3.5 s behind rank 0's; "
            "preflight.max_clock_offset allows 2 s at most",
        ),
        (
            {"min_matmul": 50},
            {"matmul": [{"device": "cuda:1", "flops_per_s": 4.99e10}]},
            "matmul",
            "cuda:1 of rank 3 (node 1, host2) does 49.9 GFLOP/s; preflight.min_matmul allows 50 GFLOP/s at least",
        ),
    ],
)
def test_a_rank_beyond_a_limit(keys: dict[str, Any], changed: dict[str, Any], check_name: str, said: str) -> None:
    fast = {"matmul": [{"device": "cuda:0", "flops_per_s": 6e10}]}
    ranks = [*(rank(number, **fast) for number in range(3)), rank(3, **{**fast, **changed})]
    assert failures(found(ranks=ranks), **keys) == [(check_name, said)]
    assert failures(found(ranks=ranks), **dict.fromkeys(keys)) == []


def test_a_clock_within_the_error_of_its_measurement_passes() -> None:
    ranks = [rank(0), rank(1, clock={"ahead_s": 1.2, "error_s": 0.3}), rank(2), rank(3)]
    assert failures(found(ranks=ranks), max_clock_offset=1) == []
    assert len(failures(found(ranks=ranks), max_clock_offset=0.8)) == 1


def test_a_nodes_disk_and_shared_memory_are_told_once() -> None:
    ranks = [rank(0), rank(1), *(rank(number, free_disk_bytes=10**9, free_shm_bytes=None) for number in (2, 3))]
    assert failures(found(ranks=ranks), min_free_disk=1.5, min_shm=1) == [
        (
            "free_disk",
            "953.7 MiB are free for the run directory of node 1, host2; preflight.min_free_disk allows 1.5 GB at least",
        ),
        ("shm", "an unknown amount is free in /dev/shm of node 1, host2; preflight.min_shm allows 1 GB at least"),
    ]


def test_a_link_beyond_a_limit() -> None:
    links = [link(*pair) for pair in PAIRS]
    links[2] = link(1, 3, bytes_per_s=12.3e6, latency_s=0.02)
    assert failures(found(links=links), max_latency="0.01s", min_link_bandwidth=100) == [
        (
            "latency",
            "the way between rank 1 (host1) and rank 3 (host2) takes 20 ms; "
            "preflight.max_latency allows 0.01 s at most",
        ),
        (
            "link bandwidth",
            "the link between rank 1 (host1) and rank 3 (host2) carries 12.3 MB/s at 4 MiB; "
            "preflight.min_link_bandwidth allows 100 MB/s at least",
        ),
    ]


def test_the_bus_bandwidth_is_that_of_all_reduce_at_its_best() -> None:
    given = found(checks=[check("broadcast", bus=1e6), check("all_reduce", bus=2e8)])
    assert failures(given, min_bus_bandwidth=200) == []
    answer = assess(given, settings(min_bus_bandwidth=201))
    assert [(each["value"], each["limit"]) for each in answer["failures"]] == [(200.0, 201.0)]
    assert failures(found(checks=[]), min_bus_bandwidth=201) == []  # one process: nothing to measure


def test_a_rank_with_another_version_is_named() -> None:
    odd = {"python": "3.11.2", "torch": "2.10", "framework": "1"}
    ranks = [rank(0), rank(1, versions=odd), rank(2), rank(3, versions=odd)]
    assert failures(found(ranks=ranks)) == [("versions", "torch is 2.10 on ranks 1, 3, and 2.15 on rank 0")]


@pytest.mark.parametrize(
    ("states", "said"),
    [
        (("there", "there"), None),
        (("missing", "missing"), None),  # it may be downloaded yet
        (("there", "missing"), "data.root=/d is missing on node 1, host2 and there on another node"),
        (("not readable", "there"), "data.root=/d is not readable on node 0, host1"),
    ],
)
def test_the_data_root(states: tuple[str, str], said: str | None) -> None:
    ranks = [rank(number, data_root={"path": "/d", "state": states[number // 2]}) for number in range(4)]
    assert failures(found(ranks=ranks)) == ([] if said is None else [("data root", said)])
    notes = assess(found(ranks=ranks), settings())["notes"]
    assert notes == (["data.root=/d isn't there yet"] if states == ("missing", "missing") else [])


def test_what_was_cut_or_left_out_is_noted() -> None:
    checks = [
        check("all_reduce", cut_at_bytes=65536),
        check("all_to_all", unsupported="Backend gloo does not support it", points=[]),
    ]
    sizes = {"max_bytes": 4096, "limited_by": "the free memory of rank 1 (host1) leaves 4 KiB for a buffer"}
    num_links = {"within_node": 2, "between_nodes": 1234}
    assert assess(found(checks=checks, sizes=sizes, num_links=num_links), settings())["notes"] == [
        "all_to_all is not supported by gloo: Backend gloo does not support it",
        "nothing above 4 KiB was exchanged: the free memory of rank 1 (host1) leaves 4 KiB for a buffer",
        "preflight.seconds=20 ended the growth of sizes: all_reduce after 64 KiB",
        "preflight.seconds=20 ended the measuring of links between nodes: 2 of 1,234",
    ]


# How it is said


def said(**changes: Any) -> dict[str, Any]:
    given = found(**changes)
    return {**given, **assess(given, settings())}


def test_the_slow_link_is_named_with_its_machines() -> None:
    links = [link(*pair) for pair in PAIRS]
    links[2] = link(1, 3, bytes_per_s=12.3e6)
    assert link_line(said(links=links)) == (
        "slowest link: rank 1 (host1) – rank 3 (host2): 6.15 MB/s at 256 KiB, 81.3 times slower than the median link "
        "between nodes, which stands out"
    )
    assert link_line(said()) == (
        "slowest link: rank 0 (host1) – rank 1 (host1): 500 MB/s at 256 KiB, as fast as the median link within a node"
    )


def test_on_one_machine_ranks_have_no_host() -> None:
    ranks = [rank(0), rank(1)]
    result = said(ranks=ranks, links=[link(0, 1)])
    assert link_line(result) == "slowest link: rank 0 – rank 1: 500 MB/s at 256 KiB, the only one"
    assert device_line(result) == "slowest rank: rank 0 on cpu: 40.0 GFLOP/s, as fast as the median"
    alone = said(ranks=ranks[:1], links=[])
    assert (link_line(alone), device_line(alone)) == (None, None)


def test_a_slow_node_is_named() -> None:
    links = [link(*pair) for pair in PAIRS]
    result = {**said(links=links), "slow_nodes": [1], "slowest_link": slowest_link(links)}
    assert str(link_line(result)).endswith("; all links of node 1 (host2) are slow")


def test_the_verdict() -> None:
    assert verdict(said()) == "Preflight passed in 1.2 s: 4 ranks, every value right"
    faults = [{"check": f"check{number % 2}", "rank": 0, "text": "?"} for number in range(12)]
    lines = verdict(said(faults=faults)).splitlines()
    assert lines[0] == "Preflight failed in 1.2 s: check0, check1"
    assert lines[1] == "  check0: wrong values on rank 0: ?"
    assert lines[-1] == "  … and 2 more"


def test_amounts() -> None:
    assert [amount(size) for size in (0, 4, 1023, 1024, 65536, 2**28, 1.5 * 2**30)] == [
        *("0 B", "4 B", "1023 B", "1 KiB", "64 KiB", "256 MiB", "1.5 GiB")
    ]
    assert [rate(value) for value in (12.0, 999.4, 999.6, 12.34e6, 1.5e9)] == [
        *("12.0 B/s", "999 B/s", "1.00 kB/s", "12.3 MB/s", "1.50 GB/s")
    ]
    assert flops(4.2e12) == "4.20 TFLOP/s"
    assert [seconds_text(value) for value in (0.0, 52e-6, 1.4e-3, 12.34, -2e-3, 4000.0)] == [
        *("0 µs", "52 µs", "1.4 ms", "12.3 s", "-2 ms", "4,000 s")
    ]
