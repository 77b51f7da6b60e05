"""The map of a topology: every rank is on it or within a range that is, and it stays a page."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.jobs.drawing import WIDTH, draw, numbers
from framework.topology import Topology

TOPOLOGIES = st.builds(
    Topology,
    nnodes=st.integers(1, 3000),
    procs_per_node=st.integers(1, 600),
    gpus_per_node=st.just(0) | st.integers(1, 600),
    span=st.integers(1, 9),
)


def cells(drawn: str, label: str) -> list[list[str]]:
    """The rows of that label, one list of cells for each."""
    found = re.findall(rf"^    {label} *│(.*)│$", drawn, re.MULTILINE)
    return [[cell.strip() for cell in row.split("│")] for row in found]


def test_two_nodes() -> None:
    assert draw(Topology(nnodes=2, procs_per_node=2, gpus_per_node=4, span=2)) == (
        "  node 0        ┌──────┬──────┐\n"
        "    rank        │  0   │  1   │\n"
        "    local rank  │  0   │  1   │\n"
        "    GPU         │ 0, 1 │ 2, 3 │\n"
        "                └──────┴──────┘\n"
        "  node 1        ┌──────┬──────┐\n"
        "    rank        │  2   │  3   │\n"
        "    local rank  │  0   │  1   │\n"
        "    GPU         │ 0, 1 │ 2, 3 │\n"
        "                └──────┴──────┘"
    )


def test_devices_that_are_shared_or_no_gpus() -> None:
    assert cells(draw(Topology(1, 4, 3, 2)), "GPU") == [["0, 1", "2, 0", "1, 2", "0, 1"]]
    assert cells(draw(Topology(1, 1, 8, 8)), "GPU") == [["0–7"]]
    assert cells(draw(Topology(1, 2, 0, 1)), "device") == [["CPU", "CPU"]]
    assert cells(draw(Topology(1, 1, 0, 2)), "device") == [["2 × CPU"]]


def test_many_nodes_are_condensed() -> None:
    drawn = draw(Topology(nnodes=2048, procs_per_node=8, gpus_per_node=8, span=1))
    assert "  nodes 1–2046  likewise: ranks 8–16375, 8 on each node" in drawn.splitlines()
    assert [row[0] for row in cells(drawn, "rank")] == ["0", "16376"]
    assert cells(drawn, "rank")[-1][-1] == "16383"


@given(TOPOLOGIES)
def test_it_is_a_page_and_nobody_is_missing(topology: Topology) -> None:
    drawn = draw(topology)
    lines = drawn.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= WIDTH or topology.span > 9
    procs = topology.procs_per_node
    ranks, likewise = _ranks(drawn, procs=procs)
    shown = [int(cell) for cell in ranks if cell != "…"]
    assert shown[0] == 0
    assert shown[-1] == topology.world_size - 1
    if "…" not in ranks:
        assert sorted([*shown, *likewise]) == list(topology.ranks())


def _ranks(drawn: str, *, procs: int) -> tuple[list[str], range]:
    shown = [cell for row in cells(drawn, "rank") for cell in row]
    found = re.search(r"likewise: ranks (\d+)–(\d+)", drawn)
    return shown, range(int(found[1]), int(found[2]) + 1) if found else range(0)


@pytest.mark.parametrize(
    ("values", "text"), [([], ""), ([3], "3"), ([3, 4], "3, 4"), ([3, 4, 5], "3–5"), ([2, 0, 1], "2, 0, 1")]
)
def test_runs_of_numbers_are_short(values: list[int], text: str) -> None:
    assert numbers(values) == text
