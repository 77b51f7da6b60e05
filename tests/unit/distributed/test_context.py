"""The devices and the backend of a rank, and requests that this torch or machine can't serve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest
import torch

from framework.errors import RequestError, TopologyError
from tests.helpers.internals import Topology, make_context


@pytest.fixture
def four_gpus(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A rank in its topology, and what it owns."""

    topology: Topology
    node_rank: int = 0
    local_rank: int
    backend_name: Literal["auto", "gloo"] = "auto"
    rank: int
    devices: list[str]
    backend: str


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    "place",
    [
        Place(
            topology=Topology(nnodes=1, procs_per_node=2, gpus_per_node=0, span=2),
            local_rank=1,
            rank=1,
            devices=["cpu", "cpu"],
            backend="gloo",
        ),
        Place(
            topology=Topology(nnodes=3, procs_per_node=2, gpus_per_node=4, span=2),
            node_rank=2,
            local_rank=1,
            rank=5,
            devices=["cuda:2", "cuda:3"],
            backend="nccl",
        ),
        Place(
            topology=Topology(nnodes=3, procs_per_node=2, gpus_per_node=4, span=2),
            local_rank=0,
            backend_name="gloo",
            rank=0,
            devices=["cuda:0", "cuda:1"],
            backend="gloo",
        ),
        # Shared GPUs wrap around.
        Place(
            topology=Topology(nnodes=1, procs_per_node=3, gpus_per_node=4, span=2),
            local_rank=2,
            rank=2,
            devices=["cuda:0", "cuda:1"],
            backend="gloo",
        ),
    ],
)
def test_a_rank_owns_its_span_of_devices(place: Place):
    context = make_context(
        place.topology,
        node_rank=place.node_rank,
        local_rank=place.local_rank,
        backend_name=place.backend_name,
    )
    assert context.rank == place.rank
    assert context.world_size == place.topology.world_size
    assert context.is_main == (place.rank == 0)
    assert [str(device) for device in context.devices] == place.devices
    assert str(context.device) == place.devices[0]
    assert context.backend == place.backend


def test_what_torch_or_the_machine_lacks_is_refused(monkeypatch, four_gpus):
    place = {"node_rank": 0, "local_rank": 0}
    with pytest.raises(TopologyError, match=r"trainer\.gpus=8, but torch .* sees 4"):
        make_context(Topology(1, 8, 8, 1), backend_name="auto", **place)
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: name == "gloo")
    with pytest.raises(RequestError, match=r"backend\.name=mpi isn't in this .*Use one of auto, gloo\."):
        make_context(Topology(1, 1, 0, 1), backend_name="mpi", **place)


def test_one_process_needs_no_nccl(monkeypatch, four_gpus):
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: name == "gloo")
    place = {"node_rank": 0, "local_rank": 0}
    assert make_context(Topology(1, 1, 1, 1), backend_name="auto", **place).backend == "gloo"
    with pytest.raises(RequestError, match=r"backend\.name=nccl isn't in this torch"):
        make_context(Topology(1, 1, 1, 1), backend_name="nccl", **place)
    with pytest.raises(RequestError, match=r"backend\.name=nccl isn't in this torch"):
        make_context(Topology(1, 2, 2, 1), backend_name="auto", **place)
