from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.config.schema import TopologyConfig
from framework.errors import TopologyError
from framework.topology import Topology, divisors, resolve_topology

OPTIONAL = st.none() | st.integers(1, 12)


def asked(procs: int | None, span: int | None, least: int) -> TopologyConfig:
    return TopologyConfig(
        nnodes=1, node_rank=0, procs_per_node=procs, gpus_per_process=span, min_gpus_per_process=least
    )


@given(procs=OPTIONAL, span=OPTIONAL, least=st.integers(1, 4), gpus=st.integers(0, 24))
def test_what_is_resolved_keeps_what_was_asked_for_and_uses_every_gpu_once(procs, span, least, gpus):
    settings = asked(procs, span, least)
    if not _possible(procs, span, least, gpus):
        with pytest.raises(TopologyError, match=r"topology\."):
            resolve_topology(settings, gpus=gpus)
        return
    topology = resolve_topology(settings, gpus=gpus)
    assert procs in (None, topology.procs_per_node)
    assert span in (None, topology.span)
    assert topology.span >= least
    owned = [index for rank in topology.ranks() for index in topology.device_indices(rank)]
    assert owned == list(range(gpus))
    assert topology.gpus_per_node == gpus


def _possible(procs: int | None, span: int | None, least: int, gpus: int) -> bool:
    """By search over all answers instead of by rules."""
    if gpus == 0:
        return span is None or span >= least
    spans = [span] if span else [least] if procs is None else range(1, gpus + 1)
    return any(n >= least and procs in (None, p) and p * n == gpus for p in range(1, gpus + 1) for n in spans)


@given(nnodes=st.integers(1, 5), procs=st.integers(1, 9))
def test_ranks_are_numbered_node_by_node(nnodes, procs):
    topology = Topology(nnodes, procs, gpus_per_node=0, span=1)
    ranks = [topology.rank_of(node, local) for node in range(nnodes) for local in range(procs)]
    assert ranks == list(topology.ranks())
    assert topology.world_size == nnodes * procs


def test_without_gpus_processes_own_the_cpu_as_often_as_the_model_needs():
    assert resolve_topology(asked(None, None, 1), gpus=0) == Topology(1, 1, 0, 1)
    assert resolve_topology(asked(2, None, 2), gpus=0) == Topology(1, 2, 0, 2)
    assert resolve_topology(asked(2, 3, 2), gpus=0) == Topology(1, 2, 0, 3)
    assert Topology(1, 2, 0, 2).device_indices(1) == ()


@pytest.mark.parametrize(
    ("settings", "gpus", "message"),
    [
        ((3, None, 1), 8, "topology.procs_per_node=3 doesn't divide trainer.gpus=8. Use one of 1, 2, 4, 8."),
        ((3, None, 2), 8, "Use one of 1, 2, 4."),
        ((None, 3, 1), 8, "topology.gpus_per_process=3 doesn't divide trainer.gpus=8. Use one of 1, 2, 4, 8."),
        ((2, 3, 1), 8, "Use trainer.gpus=6"),
        ((None, 1, 2), 8, "topology.gpus_per_process=1 is less than the model needs"),
        ((8, None, 2), 8, "leaves 1 of trainer.gpus=8 to each process"),
        ((None, None, 2), 5, "Use trainer.gpus=4 or 6, or topology.procs_per_node=1"),
        ((None, None, 2), 1, "Use trainer.gpus=2 or a multiple of it, or trainer.gpus=0"),
    ],
)
def test_a_topology_that_does_not_fit_says_what_does(settings, gpus, message):
    with pytest.raises(TopologyError) as caught:
        resolve_topology(asked(*settings), gpus=gpus)
    assert message in str(caught.value)


def test_places_that_do_not_exist_are_refused():
    topology = Topology(nnodes=2, procs_per_node=2, gpus_per_node=4, span=2)
    for wrong in (lambda: topology.rank_of(2, 0), lambda: topology.rank_of(0, 2), lambda: topology.device_indices(-1)):
        with pytest.raises(TopologyError, match="There is no"):
            wrong()


@given(st.integers(1, 200))
def test_divisors_are_all_that_divide(number):
    assert {d for d in range(1, number + 1) if number % d == 0} == set(divisors(number))


def test_neither_topology_nor_hardware_imports_torch():
    code = "import sys, framework.topology, framework.hardware as h; h.cpu_count(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
