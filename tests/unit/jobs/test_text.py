"""What jobs print at their end: the facts that a person needs, wherever they are on the page."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.internals import Topology, rank_table, render_plan

# job=plan: the table of ranks

TOPOLOGIES = st.builds(
    Topology,
    nnodes=st.integers(1, 3000),
    procs_per_node=st.integers(1, 600),
    gpus_per_node=st.just(0) | st.integers(1, 600),
    span=st.integers(1, 9),
)


def rows(topology: Topology) -> list[list[str]]:
    """The cells of each row below the title."""
    return [re.split(r" {2,}", line.strip()) for line in rank_table(topology).splitlines()[1:]]


def test_a_table_shows_where_each_rank_is() -> None:
    assert rows(Topology(nnodes=2, procs_per_node=2, gpus_per_node=4, span=2)) == [
        ["0", "0", "0", "0, 1"],
        ["1", "0", "1", "2, 3"],
        ["2", "1", "0", "0, 1"],
        ["3", "1", "1", "2, 3"],
    ]
    assert [row[3] for row in rows(Topology(1, 4, 3, 2))] == ["0, 1", "2, 0", "1, 2", "0, 1"]
    assert [row[3] for row in rows(Topology(1, 2, 0, 1))] == ["CPU", "CPU"]
    assert [row[3] for row in rows(Topology(1, 1, 0, 2))] == ["CPU, CPU"]


@given(TOPOLOGIES)
def test_a_long_table_leaves_out_the_middle(topology: Topology) -> None:
    ranks = [row[0] for row in rows(topology)]
    assert (ranks[0], ranks[-1]) == ("0", str(topology.world_size - 1))
    assert len(ranks) <= 17
    if "…" not in ranks:
        assert ranks == [str(rank) for rank in range(topology.world_size)]


# job=plan: the page

PLAN: dict[str, Any] = {
    "recipe": "some",
    "launcher": "elastic",
    "strategy": "DDP",
    "optimizer": "Adam",
    "groups": [],
    "notes": ["it is so"],
    "shards": 1,
    "exchanges_every": 1,
    "backend": {"name": "nccl", "init_method": "env", "init_timeout_s": 300.0, "timeout_s": 90.0},
    "batch": {
        "global": 100,
        "accumulate_grad_batches": 2,
        "num_microbatches": 1,
        "per_rank": {"least": 12, "most": 13},
        "per_forward": {"least": 6, "most": 7},
    },
    "data": {"train": 1600, "val": None, "test": 200, "streams": [], "source": "data"},
    "steps": {"per_epoch": 16, "total": 160, "max_epochs": 10, "max_steps": None},
    "model": {"name": "Net", "parameters": 1000, "trainable": 900},
    "memory": {"parameters": 4000, "gradients": 3600, "optimizer": 7200, "buffers": 0, "averages": 0},
    "traffic": {"reduced": 3600, "ring_per_rank": 6300},
    "checkpoint": 123_456,
    "run_dir": "outputs/some/<date>_<time>_<4 hex>",
    "environment": {"common": {"WORLD_SIZE": "8"}, "first_rank": {"RANK": "0"}, "last_rank": {"RANK": "7"}},
    "commands": {name: [name, "-m", "framework", "a=1"] for name in ("framework", "torchrun", "srun")},
}
TOPOLOGY = Topology(2, 4, 8, 2)
ALONE = Topology(1, 1, 0, 1)
UNKNOWN: dict[str, Any] = {"train": None, "val": None, "test": None, "streams": [], "source": None}


@pytest.mark.parametrize(
    ("topology", "changes", "facts"),
    [
        (
            TOPOLOGY,
            {},
            [
                "2 nodes × 4 processes = 8 ranks",
                "8 GPUs a node, 2 for each rank",
                "strategy DDP",
                "name nccl",
                "train 1,600, test 200, source data",
                "global 100",
                "per_rank 12 or 13, per_forward 6 or 7",
                "per_epoch 16, total 160, max_epochs 10",
                "name Net, parameters 1,000, trainable 900",
                "memory parameters 4.00 kB, gradients 3.60 kB, optimizer 7.20 kB",
                "on each rank 14.8 kB",
                "reduced 3.60 kB, ring_per_rank 6.30 kB",
                "checkpoint 123 kB",
                PLAN["run_dir"],
                "RANK=0",
                "RANK=7",
                "NODE: 0 to 1",
                "framework -m framework a=1",
                "torchrun -m framework a=1",
                "Note: it is so",
            ],
        ),
        (TOPOLOGY, {"data": UNKNOWN, "checkpoint": None}, ["data –", "checkpoint –"]),
        (ALONE, {"traffic": {"reduced": 0}}, ["1 process = 1 rank on the CPU", "traffic –", "one of framework -m"]),
    ],
)
def test_facts_of_a_plan(topology: Topology, changes: dict[str, Any], facts: list[str]) -> None:
    text = " ".join(render_plan({**PLAN, **changes}, topology).split())
    assert [fact for fact in facts if fact not in text] == []


def test_a_single_rank_has_one_line_of_environment() -> None:
    of_rank = {"RANK": "0"}
    environment = {"common": {}, "first_rank": of_rank, "last_rank": of_rank}
    assert render_plan({**PLAN, "environment": environment}, ALONE).count("RANK=0") == 1
