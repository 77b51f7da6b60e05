from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from framework.config.parse import parse
from framework.errors import ConfigError, TopologyError
from framework.jobs.choosing import checked_topology, chosen_launcher
from framework.jobs.request import Place, Request
from framework.launch.environment import detect
from framework.launch.leader import Leader
from tests.unit.config.raw import raw_config

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "0",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


def request(changes: dict[str, Any], *, leader: Leader | None = None) -> Request:
    raw = raw_config(changes)
    return Request(parse(raw), raw, overrides=(), leader=leader)


@pytest.fixture
def leader() -> Leader:
    place = detect(TORCHRUN)
    assert place is not None
    return Leader(place, [])


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "local"),
        ({"launcher.name": "in_place"}, "in_place"),
        ({"launcher.max_restarts": 2}, "elastic"),
        ({"topology.nnodes": 2, "topology.rdzv_endpoint": "node0:29400"}, "elastic"),
    ],
)
def test_auto_follows_from_what_is_asked_for(changes: dict[str, Any], name: str) -> None:
    assert chosen_launcher(request(changes)) == name


@pytest.mark.parametrize("launcher", ["auto", "elastic"])
def test_several_nodes_need_a_place_to_meet(launcher: str) -> None:
    with pytest.raises(ConfigError, match=r"topology.nnodes=2 needs topology.rdzv_endpoint=HOST:PORT"):
        chosen_launcher(request({"topology.nnodes": 2, "launcher.name": launcher}))


def test_ranks_that_were_started_meet_where_their_starter_says(leader: Leader) -> None:
    assert chosen_launcher(request({"topology.nnodes": 2}, leader=leader)) == "adopted"


def test_ranks_that_were_started_take_no_other_launcher(leader: Leader) -> None:
    with pytest.raises(ConfigError, match="launcher=elastic is configured, but torchrun has started"):
        chosen_launcher(request({"launcher.name": "elastic"}, leader=leader))


def test_nothing_is_adopted_where_nothing_was_started() -> None:
    with pytest.raises(ConfigError, match="this process isn't one of several"):
        chosen_launcher(request({"launcher.name": "adopted"}))


NODES = {"topology.nnodes": 2, "topology.rdzv_endpoint": "node0:29400", "trainer.gpus": 0}


@pytest.mark.parametrize("is_planned", [False, True])
@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({**NODES, "backend.init_method": "file"}, ConfigError, "init_method=file is for ranks of one machine"),
        ({"launcher.name": "adopted", "trainer.gpus": 0}, ConfigError, "this process isn't one of several"),
        (
            {"launcher.name": "in_place", "trainer.gpus": 0, "topology.procs_per_node": 2},
            TopologyError,
            "launcher=in_place runs one process, and 2 are asked for",
        ),
    ],
)
def test_a_plan_refuses_what_a_run_does(
    changes: dict[str, Any], error: type[Exception], said: str, is_planned: bool
) -> None:
    with pytest.raises(error, match=said):
        checked_topology(request(changes), is_planned=is_planned)


def test_a_sweep_is_of_one_node(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"topology.nnodes=2 nodes can meet for one only"):
        checked_topology(replace(request(NODES), place=Place(tmp_path, 0)))


def test_a_plan_needs_no_gpus_and_no_place_to_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("framework.hardware.visible_gpus", lambda: [])
    planned = request({"topology.nnodes": 2, "trainer.gpus": 8})
    assert checked_topology(planned, is_planned=True).world_size == 16
    with pytest.raises(ConfigError, match=r"needs topology.rdzv_endpoint"):
        checked_topology(planned)


def test_a_plan_of_ranks_that_were_started_is_of_those(leader: Leader) -> None:
    planned = checked_topology(request({"trainer.gpus": 2}, leader=leader), is_planned=True)
    assert (planned.nnodes, planned.procs_per_node) == (2, 2)
    with pytest.raises(TopologyError, match=r"topology.procs_per_node=8, but torchrun has started"):
        checked_topology(request({"topology.procs_per_node": 8}, leader=leader), is_planned=True)
