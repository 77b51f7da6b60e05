"""The topology of ranks that something else has started, against what is configured."""

from __future__ import annotations

import pytest

from framework.errors import ConfigError, TopologyError
from tests.helpers.internals import ClusterEnvironment, Config, Topology, external_topology, parse
from tests.unit.config.raw import raw_config

CLUSTER = ClusterEnvironment("srun", rank=0, local_rank=0, nnodes=2, procs_per_node=4, host="a", port=1)


def config(**keys: object) -> Config:
    return parse(raw_config(keys))


def topology(visible: int, **keys: object) -> Topology:
    return external_topology(config(**keys), CLUSTER, visible_gpus=visible)


@pytest.mark.parametrize(
    "keys", [{}, {"topology.nnodes": 2}, {"topology.procs_per_node": 4}, {"topology.node_rank": 0}]
)
def test_nodes_and_processes_are_those_that_were_started(keys):
    assert topology(0, **keys) == Topology(nnodes=2, procs_per_node=4, gpus_per_node=0, span=1)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"topology.nnodes": 3}, r"topology.nnodes=3, but srun has started processes on 2 nodes"),
        ({"topology.procs_per_node": 2}, r"topology.procs_per_node=2, but srun has started 4 processes"),
        ({"topology.node_rank": 1, "topology.nnodes": 2}, r"topology.node_rank=1, but srun .* node 0"),
        ({"topology.rdzv_endpoint": "b:2"}, r"topology.rdzv_endpoint=b:2, but srun has started ranks that meet at a:1"),
        ({"trainer.gpus": 6}, r"trainer.gpus=6 can't be split into processes with topology.procs_per_node=4"),
    ],
)
def test_a_contradiction_is_refused_with_both_numbers(keys, message):
    with pytest.raises(TopologyError, match=message):
        topology(8, **keys)


@pytest.mark.parametrize(("key", "value"), [("backend.init_method", "tcp"), ("launcher.max_restarts", 3)])
def test_what_needs_a_launcher_of_ours_is_refused(key, value):
    with pytest.raises(ConfigError, match=f"{key}={value} can't"):
        topology(0, **{key: value})


@pytest.mark.parametrize(
    ("visible", "keys", "expected"),
    [
        (4, {}, (4, 1, False)),
        # A process takes what its model needs, as under torchrun.
        (8, {}, (4, 1, False)),
        (8, {"trainer.gpus": 8}, (8, 2, False)),
        (8, {"topology.min_gpus_per_process": 2}, (8, 2, False)),
        # This is srun --gpus-per-task=1.
        (1, {}, (4, 1, True)),
        (2, {"trainer.gpus": 8}, (8, 2, True)),
        (8, {"trainer.gpus": 0}, (0, 1, False)),
    ],
)
def test_spans_follow_from_gpus_of_the_node(visible, keys, expected):
    found = topology(visible, **keys)
    assert (found.gpus_per_node, found.span, found.own_view) == expected


def test_visible_gpus_are_counted_from_0():
    found = topology(2, **{"trainer.gpus": 8})
    assert [found.device_indices(rank) for rank in range(4)] == [(0, 1)] * 4
    assert found.gpus_in_view == 2


@pytest.mark.parametrize(("visible", "keys"), [(3, {}), (2, {}), (1, {"trainer.gpus": 8}), (0, {"trainer.gpus": 4})])
def test_too_few_gpus_are_refused_with_the_numbers(visible, keys):
    with pytest.raises(TopologyError, match=rf"4 processes on a node need \d GPUs, \d each.* sees {visible}"):
        topology(visible, **keys)
