from __future__ import annotations

import json
from pathlib import Path

import pytest

from framework.config.schema import InitMethod
from framework.launch.plan import RankArguments, rank_environment, rendezvous_url
from framework.topology import Topology

TWO_NODES = Topology(nnodes=2, procs_per_node=3, gpus_per_node=6, span=2)


@pytest.mark.parametrize("rendezvous", [None, "tcp://127.0.0.1:4000"])
def test_what_a_rank_is_told_survives_json(rendezvous: str | None) -> None:
    told = RankArguments("/runs/one", TWO_NODES, rank=4, rendezvous=rendezvous)
    assert RankArguments.from_plain(json.loads(json.dumps(told.to_plain()))) == told


def test_a_rank_knows_its_place_node_by_node() -> None:
    told = [RankArguments("/runs/one", TWO_NODES, rank=rank, rendezvous=None) for rank in range(6)]
    assert [(each.node_rank, each.local_rank) for each in told] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert [TWO_NODES.rank_of(each.node_rank, each.local_rank) for each in told] == list(range(6))


def test_every_init_method_has_its_url() -> None:
    folder = Path("/tmp/new")
    urls = {method: rendezvous_url(method, host="127.0.0.1", port=4000, folder=folder) for method in InitMethod}
    assert urls == {
        InitMethod.ENV: "env://",
        InitMethod.TCP: "tcp://127.0.0.1:4000",
        InitMethod.FILE: "file:///tmp/new/rendezvous",
    }


def test_ranks_have_torchruns_variables() -> None:
    assert rank_environment(TWO_NODES, rank=5, host="node0", port=4000) == {
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "4000",
        "RANK": "5",
        "LOCAL_RANK": "2",
        "GROUP_RANK": "1",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
