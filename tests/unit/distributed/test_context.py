from __future__ import annotations

import pytest
import torch

from framework.config.schema import BackendName
from framework.distributed.context import make_context
from framework.errors import RequestError, TopologyError
from framework.topology import Topology


@pytest.fixture
def four_gpus(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)


def test_without_gpus_every_device_is_the_cpu_and_auto_is_gloo():
    topology = Topology(nnodes=1, procs_per_node=2, gpus_per_node=0, span=2)
    context = make_context(topology, node_rank=0, local_rank=1, backend_name=BackendName.AUTO)
    assert context.devices == (torch.device("cpu"),) * 2
    assert (context.rank, context.world_size, context.backend, context.is_main) == (1, 2, "gloo", False)


def test_a_rank_owns_its_span_of_gpus_and_auto_is_nccl(four_gpus):
    topology = Topology(nnodes=3, procs_per_node=2, gpus_per_node=4, span=2)
    context = make_context(topology, node_rank=2, local_rank=1, backend_name=BackendName.AUTO)
    assert context.devices == (torch.device("cuda:2"), torch.device("cuda:3"))
    assert context.device == torch.device("cuda:2")
    assert (context.rank, context.backend) == (5, "nccl")
    assert make_context(topology, node_rank=0, local_rank=0, backend_name=BackendName.GLOO).backend == "gloo"


def test_shared_gpus_wrap_around_and_auto_is_gloo(four_gpus):
    topology = Topology(nnodes=1, procs_per_node=3, gpus_per_node=4, span=2)
    context = make_context(topology, node_rank=0, local_rank=2, backend_name=BackendName.AUTO)
    assert context.devices == (torch.device("cuda:0"), torch.device("cuda:1"))
    assert context.backend == "gloo"


def test_nccl_without_gpus_is_refused():
    with pytest.raises(RequestError, match=r"Use backend\.name=gloo or backend\.name=auto"):
        make_context(Topology(1, 1, 0, 1), node_rank=0, local_rank=0, backend_name=BackendName.NCCL)


def test_a_backend_this_torch_lacks_is_refused_with_those_it_has(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: name == "gloo")
    with pytest.raises(RequestError, match=r"backend\.name=mpi isn't in this .*Use one of auto, gloo\."):
        make_context(Topology(1, 1, 0, 1), node_rank=0, local_rank=0, backend_name=BackendName.MPI)


def test_gpus_that_torch_does_not_see_are_refused(four_gpus):
    with pytest.raises(TopologyError, match=r"trainer\.gpus=8, but torch .* sees 4"):
        make_context(Topology(1, 8, 8, 1), node_rank=0, local_rank=0, backend_name=BackendName.AUTO)
