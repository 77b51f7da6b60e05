"""The devices and the backend of a rank, and requests that this torch or machine can't serve."""

from __future__ import annotations

import pytest
import torch

from framework.errors import RequestError, TopologyError
from tests.helpers.internals import Topology, make_context


@pytest.fixture
def four_gpus(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("topology", "place", "name", "rank", "devices", "backend"),
    [
        (Topology(nnodes=1, procs_per_node=2, gpus_per_node=0, span=2), (0, 1), "auto", 1, ["cpu", "cpu"], "gloo"),
        (
            Topology(nnodes=3, procs_per_node=2, gpus_per_node=4, span=2),
            (2, 1),
            "auto",
            5,
            ["cuda:2", "cuda:3"],
            "nccl",
        ),
        (
            Topology(nnodes=3, procs_per_node=2, gpus_per_node=4, span=2),
            (0, 0),
            "gloo",
            0,
            ["cuda:0", "cuda:1"],
            "gloo",
        ),
        # Shared GPUs wrap around.
        (
            Topology(nnodes=1, procs_per_node=3, gpus_per_node=4, span=2),
            (0, 2),
            "auto",
            2,
            ["cuda:0", "cuda:1"],
            "gloo",
        ),
    ],
)
def test_a_rank_owns_its_span_of_devices(topology, place, name, rank, devices, backend):
    context = make_context(topology, node_rank=place[0], local_rank=place[1], backend_name=name)
    assert (context.rank, context.world_size, context.is_main) == (rank, topology.world_size, rank == 0)
    assert [str(device) for device in context.devices] == devices
    assert str(context.device) == devices[0]
    assert context.backend == backend


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
