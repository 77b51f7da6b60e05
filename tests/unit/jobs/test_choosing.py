"""Which launcher a request gets and who runs where: the same for a run and for its plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from framework.command.launcher import backend_name, checked_topology, chosen_launcher
from framework.command.request import Request
from framework.config.parse import parse
from framework.config.topology import Topology
from framework.errors import ConfigError, FrameworkError, TopologyError
from framework.launch.environment import detect
from framework.launch.handshake import ExternalRanks
from tests.unit.config.raw import raw_config

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    **{"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
    **{"MASTER_ADDR": "node0", "MASTER_PORT": "29500"},
}
NODES = {"topology.nnodes": 2, "topology.rdzv_endpoint": "node0:29400", "trainer.gpus": 0}


def request(changes: dict[str, Any], *, external_ranks: ExternalRanks | None = None) -> Request:
    raw = raw_config(changes)
    return Request(parse(raw), raw, overrides=(), external_ranks=external_ranks)


@pytest.fixture
def external_ranks() -> ExternalRanks:
    cluster = detect(TORCHRUN)
    assert cluster is not None
    return ExternalRanks(cluster, [])


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "local"),
        ({"launcher.name": "in_process"}, "in_process"),
        ({"launcher.max_restarts": 2}, "elastic"),
    ],
)
def test_auto_follows_from_what_is_asked_for(changes: dict[str, Any], name: str) -> None:
    assert chosen_launcher(request(changes)) == name


def test_ranks_that_torchrun_has_started_are_adopted_by_no_other_launcher(external_ranks: ExternalRanks) -> None:
    assert chosen_launcher(request({"topology.nnodes": 2}, external_ranks=external_ranks)) == "external"
    with pytest.raises(ConfigError, match="launcher=elastic is configured, but torchrun has started"):
        chosen_launcher(request({"launcher.name": "elastic"}, external_ranks=external_ranks))
    planned = checked_topology(request({"trainer.gpus": 2}, external_ranks=external_ranks), is_planned=True)
    assert (planned.nnodes, planned.procs_per_node) == (2, 2)
    with pytest.raises(TopologyError, match=r"topology.procs_per_node=8, but torchrun has started"):
        checked_topology(request({"topology.procs_per_node": 8}, external_ranks=external_ranks), is_planned=True)


@pytest.mark.parametrize("is_planned", [False, True])
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({**NODES, "backend.init_method": "file"}, "init_method=file is for ranks of one machine"),
        ({"launcher.name": "external", "trainer.gpus": 0}, "this process isn't one of several"),
        (
            {"launcher.name": "in_process", "trainer.gpus": 0, "topology.procs_per_node": 2},
            "in_process runs one process",
        ),
        ({"trainer.gpus": 0, "backend.name": "nccl"}, "backend.name=nccl needs GPUs"),
        (
            {"trainer.gpus": 0, "topology.procs_per_node": 2, "strategy": {"_target_": "framework.strategies.Single"}},
            "strategy=single is for one process",
        ),
    ],
)
def test_a_plan_refuses_what_a_run_does(changes: dict[str, Any], said: str, is_planned: bool) -> None:
    with pytest.raises(FrameworkError, match=said):
        checked_topology(request(changes), is_planned=is_planned)


def test_a_sweep_is_of_one_node(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"topology.nnodes=2"):
        checked_topology(replace(request(NODES), sub_run=tmp_path / "0"))


@pytest.mark.parametrize("launcher", ["auto", "elastic"])
def test_only_a_plan_needs_no_gpus_and_no_endpoint(monkeypatch: pytest.MonkeyPatch, launcher: str) -> None:
    monkeypatch.setattr("framework.system.hardware.visible_gpus", lambda: [])
    planned = request({"topology.nnodes": 2, "trainer.gpus": 8, "launcher.name": launcher})
    assert checked_topology(planned, is_planned=True).world_size == 16
    with pytest.raises(ConfigError, match=r"topology.nnodes=2 needs topology.rdzv_endpoint=HOST:PORT"):
        checked_topology(planned)
    with pytest.raises(TopologyError, match="has no GPU"):
        checked_topology(request({"trainer.gpus": 8}))


@pytest.mark.parametrize(
    ("topology", "name"),
    [(Topology(1, 2, 2, 1), "nccl"), (Topology(1, 2, 0, 1), "gloo"), (Topology(1, 2, 1, 1), "gloo")],
    ids=["GPUs", "CPU", "shared GPUs"],
)
def test_the_backend_that_auto_becomes(topology: Topology, name: str) -> None:
    assert backend_name(parse(raw_config()), topology) == name
