"""The page of `job=preflight`."""

from __future__ import annotations

from typing import Any

from framework.jobs.preflight_text import render
from framework.preflight.assessing import assess
from tests.unit.config.raw import raw_config
from tests.unit.preflight.found import STUCK, check, found, rank


def rendered(**changes: Any) -> list[str]:
    from framework.config.parse import parse

    given = found(**changes)
    return render({**given, **assess(given, parse(raw_config()).preflight)}).splitlines()


def test_the_page() -> None:
    lines = rendered(interconnects={"0": "GPU0 GPU1\nX NV12"})
    assert lines[0].split() == [
        *("rank", "node", "device", "matmul", "clock", "late", "disk", "/dev/shm", "data", "root")
    ]
    assert "cpu A processor with a very lon…" in lines[1]
    assert ["+0 µs ±100 µs" in line for line in lines[1:5]] == [False, False, True, True]  # of nodes beside rank 0
    assert "Node 0\nGPU0 GPU1\nX NV12" in "\n".join(lines)
    assert "  barrier      in order, rank 0 first; 100 µs" in lines
    one_way = "10 rounds each; median 100 µs one way, 500 MB/s at 256 KiB"
    assert f"  ping-pong    within nodes: 2 of 2 links, {one_way}" in lines
    assert f"               between nodes: 2 of 2 links, {one_way}" in lines
    worked = "4 receivers went on meanwhile: free after 10 µs; what was sent late was there after 51 ms"
    assert f"  isend/irecv  {worked}" in lines
    times, bandwidths = (lines.index(line) for line in lines if line.endswith("broadcast  all_reduce"))
    assert [line.split() for line in lines[times + 1 : times + 4]] == [
        ["4", "B", "1", "ms", "1", "ms"],
        ["4", "KiB", "1", "ms", "1", "ms"],
        ["16", "KiB", "1", "ms", "1", "ms"],
    ]
    assert lines[bandwidths + 1].split() == ["4", "KiB", "500", "MB/s", "500", "MB/s"]  # of the tiny it says nothing
    assert lines[-1] == "Preflight passed in 1.2 s: 4 ranks, every value right"


def test_what_is_wrong_or_missing_is_seen() -> None:
    unsupported = check("all_to_all", unsupported="Backend gloo does not support it", points=[])
    ranks = [rank(0, turn=2), rank(1, turn=1), rank(2), rank(3, free_shm_bytes=None, late_sender=STUCK)]
    faults = [{"check": "broadcast", "rank": 1, "text": "?"}]
    lines = rendered(ranks=ranks, faults=faults, checks=[check("broadcast"), unsupported])
    assert any(line.split() == ["time", "of", "one", "broadcast", "WRONG"] for line in lines)
    assert "  barrier      NOT in order: 2, 1, 3, 4; 100 µs" in lines
    assert any(line.startswith("  isend/irecv  1 of 4 receivers were HELD UP: free after 20 s; ") for line in lines)
    assert "Note: all_to_all is not supported by gloo: Backend gloo does not support it" in lines
    assert lines[-2] == "  broadcast: wrong values on rank 1: ?"


def test_one_rank_talks_to_nobody() -> None:
    lines = rendered(ranks=[rank(0)], links=[], checks=[])
    assert "Note: one process has nobody to talk to: nothing was exchanged" in lines
    assert lines[-1] == "Preflight passed in 1.2 s: 1 rank"
