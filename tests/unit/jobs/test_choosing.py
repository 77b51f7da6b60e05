"""Which launcher a request gets and who runs where: the same for a run and for its plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from framework.errors import ConfigError, FrameworkError, TopologyError
from tests.helpers.internals import ExternalRanks, Placement, Request, detect, hardware_module, parse, place
from tests.unit.config.raw import raw_config

IN_PROCESS = {"launcher._target_": "framework.launch.in_process.InProcessLauncher"}
ELASTIC = {"launcher._target_": "framework.launch.elastic.ElasticLauncher"}
EXTERNAL = {"launcher._target_": "framework.launch.external.ExternalLauncher"}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "0",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
NODES = {"topology.nnodes": 2, "topology.rdzv_endpoint": "node0:29400", "trainer.gpus": 0}


def request(changes: dict[str, Any], *, external_ranks: ExternalRanks | None = None) -> Request:
    raw = raw_config(changes)
    return Request(parse(raw), raw, overrides=(), external_ranks=external_ranks)


def plan(request: Request) -> Placement:
    return place(request.config, external_ranks=request.external_ranks, is_planned=True)


@pytest.fixture
def external_ranks() -> ExternalRanks:
    cluster = detect(TORCHRUN)
    assert cluster is not None
    return ExternalRanks(cluster, [])


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "local"),
        (IN_PROCESS, "in_process"),
        ({"launcher.max_restarts": 2}, "elastic"),
    ],
)
def test_auto_follows_from_what_is_asked_for(changes: dict[str, Any], name: str) -> None:
    assert request(changes).placement.launcher.name == name


def test_only_external_adopts_ranks_of_torchrun(external_ranks: ExternalRanks) -> None:
    ranks = request({"topology.nnodes": 2, "trainer.gpus": 0}, external_ranks=external_ranks)
    assert ranks.placement.launcher.name == "external"
    with pytest.raises(ConfigError, match="launcher=elastic is configured, but torchrun has started"):
        _ = request(ELASTIC, external_ranks=external_ranks).placement
    planned = plan(request({"trainer.gpus": 2}, external_ranks=external_ranks)).topology
    assert (planned.nnodes, planned.procs_per_node) == (2, 2)
    with pytest.raises(TopologyError, match=r"topology.procs_per_node=8, but torchrun has started"):
        plan(request({"topology.procs_per_node": 8}, external_ranks=external_ranks))


@pytest.mark.parametrize("is_planned", [False, True])
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({**NODES, "backend.init_method": "file"}, "init_method=file is for ranks of one machine"),
        (
            {**EXTERNAL, "trainer.gpus": 0},
            "this process isn't one of several",
        ),
        (
            {
                **IN_PROCESS,
                "trainer.gpus": 0,
                "topology.procs_per_node": 2,
            },
            "in_process runs one process",
        ),
        ({"trainer.gpus": 0, "backend.name": "nccl"}, "backend.name=nccl needs GPUs"),
    ],
)
def test_a_plan_refuses_what_a_run_does(changes: dict[str, Any], said: str, is_planned: bool) -> None:
    with pytest.raises(FrameworkError, match=said):
        place(request(changes).config, is_planned=is_planned)


def test_a_sweep_is_of_one_node(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"topology.nnodes=2"):
        _ = replace(request(NODES), sub_run=tmp_path / "0").placement


@pytest.mark.parametrize("launcher", ["auto.AutoLauncher", "elastic.ElasticLauncher"])
def test_only_a_plan_needs_no_gpus(monkeypatch: pytest.MonkeyPatch, launcher: str) -> None:
    monkeypatch.setattr(hardware_module, "visible_gpus", lambda: [])
    planned = request({"topology.nnodes": 2, "trainer.gpus": 8, "launcher._target_": f"framework.launch.{launcher}"})
    assert plan(planned).topology.world_size == 16
    with pytest.raises(ConfigError, match=r"topology.nnodes=2 needs topology.rdzv_endpoint=HOST:PORT"):
        _ = planned.placement
    with pytest.raises(TopologyError, match="has no GPU"):
        _ = request({"trainer.gpus": 8}).placement


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"trainer.gpus": 2}, "nccl"),
        ({"trainer.gpus": 0, "topology.procs_per_node": 2}, "gloo"),
        (
            {
                "trainer.gpus": 1,
                "topology.procs_per_node": 2,
                "topology.share_gpus": True,
                "topology.gpus_per_process": 1,
            },
            "gloo",
        ),
    ],
    ids=["GPUs", "CPU", "shared GPUs"],
)
def test_the_backend_that_auto_becomes(changes: dict[str, Any], name: str) -> None:
    assert plan(request(changes)).backend == name


def test_a_placement_is_decided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware_module, "visible_gpus", lambda: [])
    placed = request({"trainer.gpus": None})
    first = placed.placement
    monkeypatch.setattr(hardware_module, "visible_gpus", lambda: ["GPU 0", "GPU 1"])
    assert placed.placement is first
    assert replace(placed).placement.topology.gpus_per_node == 2
