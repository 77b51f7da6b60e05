"""What ranks have found, laid together."""

from __future__ import annotations

from typing import Any

from framework.preflight.running import Own, together
from framework.topology import Topology

QUIET = {"ahead_s": 0.0, "error_s": 0.0}


def own(rank: int, **changes: Any) -> Own:
    """Of two nodes with two ranks each."""
    facts = {"rank": rank, "node": rank // 2, "interconnect": None}
    return Own(facts, turn={"number": rank + 1, "waits_s": [0.25 - rank / 16] * 3}, **changes)


def measured(one: int, other: int) -> dict[str, Any]:
    return {"ranks": [one, other], "points": [{"bytes": 1000, "seconds": 1.0}]}


def test_what_all_have_found_is_laid_together() -> None:
    ahead = {"ahead_s": 2.0, "error_s": 0.5}
    ranks = [own(0, links=[measured(0, 2)]), own(1, links=[measured(0, 1)]), own(2, clock=ahead), own(3)]
    ranks[0].facts["interconnect"] = "NV12"
    ranks[3].note("broadcast", ["it was wrong"])
    found = together(ranks, Topology(nnodes=2, procs_per_node=2, gpus_per_node=0, span=1))
    assert [rank["clock"] for rank in found["ranks"]] == [QUIET, QUIET, ahead, ahead]  # its node's
    assert [rank["late_s"] for rank in found["ranks"]] == [0.0, 1 / 16, 2 / 16, 3 / 16]
    assert [rank["turn"] for rank in found["ranks"]] == [1, 2, 3, 4]
    assert [(link["ranks"], link["is_within_node"]) for link in found["links"]] == [([0, 1], True), ([0, 2], False)]
    assert [link["compared_bytes_per_s"] for link in found["links"]] == [1000.0, 1000.0]
    assert found["num_links"] == {"within_node": 2, "between_nodes": 2}
    assert found["faults"] == [{"check": "broadcast", "rank": 3, "text": "it was wrong"}]
    assert found["interconnects"] == {"0": "NV12"}


def test_of_many_faults_the_first_are_told_and_how_many_more_there_are() -> None:
    mine = own(0)
    mine.note("ping-pong", [f"from rank {number}" for number in range(1000)])
    mine.note("matmul", ["wrong"])
    assert len(mine.faults) == 22
    assert mine.faults[-3:] == [
        ("ping-pong", "from rank 19"),
        ("ping-pong", "and 980 more like these"),
        ("matmul", "wrong"),
    ]
