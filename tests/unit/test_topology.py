from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.config.schema import TopologyConfig
from framework.errors import TopologyError
from framework.topology import Topology, divisors, resolve_topology

OPTIONAL = st.none() | st.integers(1, 12)


def asked(
    procs: int | None, span: int | None, least: int, *, nnodes: int = 1, share_gpus: bool = False
) -> TopologyConfig:
    return TopologyConfig(
        nnodes=nnodes,
        node_rank=0,
        procs_per_node=procs,
        gpus_per_process=span,
        min_gpus_per_process=least,
        share_gpus=share_gpus,
        rdzv_endpoint=None,
    )


SHARE = r"topology\.share_gpus=true topology\.gpus_per_process=(\d+)"
FEWER = r"Use trainer\.gpus=(\d+)"
ONE_OF = r"(?s)topology\.(\w+)=\d+ doesn't divide.*one of ([\d, ]*\d)"
PROCS = r"topology\.procs_per_node=(\d+)(?: trainer\.gpus=(\d+))?(?:, or let|;)"


@given(procs=OPTIONAL, span=OPTIONAL, least=st.integers(1, 4), gpus=st.integers(0, 24))
def test_the_topology_keeps_what_was_given_and_uses_every_gpu_once(procs, span, least, gpus):
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
    assert not topology.shares_gpus
    assert all(
        topology.device_indices(rank) == tuple(range(rank * topology.span, (rank + 1) * topology.span))
        for rank in topology.ranks()
        if gpus
    )


@given(procs=OPTIONAL, span=OPTIONAL, least=st.integers(1, 4), gpus=st.integers(1, 12))
def test_shared_gpus_wrap_around_and_each_is_used(procs, span, least, gpus):
    settings = asked(procs, span, least, share_gpus=True)
    if span is None or span < least or (procs is not None and procs * span < gpus):
        with pytest.raises(TopologyError, match=r"topology\."):
            resolve_topology(settings, gpus=gpus)
        return
    topology = resolve_topology(settings, gpus=gpus)
    assert topology.span == span
    assert topology.procs_per_node == procs or procs is None
    uses = [index for local in range(topology.procs_per_node) for index in topology.device_indices(local)]
    assert uses == [use % gpus for use in range(topology.procs_per_node * span)]
    assert set(uses) == set(range(gpus))
    assert topology.shares_gpus == (len(uses) > gpus)
    counts = [uses.count(gpu) for gpu in range(gpus)]
    assert max(counts) - min(counts) <= 1
    if procs is None:  # no more processes than it takes
        assert (topology.procs_per_node - 1) * span < gpus


@given(procs=OPTIONAL, span=st.integers(1, 12), least=st.integers(1, 4), gpus=st.integers(1, 12))
def test_permission_to_share_changes_nothing_where_all_fits(procs, span, least, gpus):
    try:
        exact = resolve_topology(asked(procs, span, least), gpus=gpus)
    except TopologyError:
        return
    assert resolve_topology(asked(procs, span, least, share_gpus=True), gpus=gpus) == exact


def _possible(procs: int | None, span: int | None, least: int, gpus: int) -> bool:
    """By search over all answers instead of by rules."""
    if gpus == 0:
        return span is None or span >= least
    spans = [span] if span else [least] if procs is None else range(1, gpus + 1)
    return any(n >= least and procs in (None, p) and p * n == gpus for p in range(1, gpus + 1) for n in spans)


@given(nnodes=st.integers(1, 5), procs=st.integers(1, 9), gpus=st.sampled_from([0, 1, 2]))
def test_ranks_are_numbered_node_by_node(nnodes, procs, gpus):
    settings = asked(procs, 1, 1, nnodes=nnodes, share_gpus=procs > gpus)
    topology = resolve_topology(settings, gpus=min(gpus, procs))
    ranks = [topology.rank_of(node, local) for node in range(nnodes) for local in range(procs)]
    assert ranks == list(topology.ranks())
    assert topology.world_size == nnodes * procs


@pytest.mark.parametrize("share_gpus", [False, True])
def test_without_gpus_processes_own_the_cpu_as_often_as_the_model_needs(share_gpus):
    for (procs, span, least), expected in {
        (None, None, 1): Topology(1, 1, 0, 1),
        (2, None, 2): Topology(1, 2, 0, 2),
        (2, 3, 2): Topology(1, 2, 0, 3),
    }.items():
        topology = resolve_topology(asked(procs, span, least, share_gpus=share_gpus), gpus=0)
        assert topology == expected
        assert topology.device_indices(0) == ()
        assert not topology.shares_gpus


@pytest.mark.parametrize(
    ("settings", "share", "gpus", "messages"),
    [
        ((3, None, 1), False, 8, ["procs_per_node=3 doesn't divide trainer.gpus=8", "one of 1, 2, 4, 8."]),
        ((3, None, 2), False, 8, ["Use trainer.gpus=6, or topology.procs_per_node=4; "]),
        ((2, None, 2), False, 5, ["Use trainer.gpus=4, or topology.procs_per_node=2 trainer.gpus=4; "]),
        ((None, 3, 1), False, 8, ["gpus_per_process=3 doesn't divide trainer.gpus=8. Use one of 1, 2, 4, 8."]),
        ((2, 3, 1), False, 8, ["Use trainer.gpus=6, or leave one of the two out (auto)."]),
        ((4, 3, 1), False, 8, ["or let processes share GPUs: topology.share_gpus=true."]),
        ((16, None, 1), False, 8, ["topology.share_gpus=true topology.gpus_per_process=1; "]),
        ((None, 1, 2), False, 8, ["topology.gpus_per_process=1 is less than the model needs"]),
        ((8, None, 2), False, 8, ["procs_per_node=8 needs 16 GPUs", "Use topology.procs_per_node=4, or let processes"]),
        ((None, None, 2), False, 5, ["Use trainer.gpus=4 or 6, or topology.procs_per_node=1"]),
        ((None, None, 2), False, 1, ["Use trainer.gpus=2 or a multiple of it, or trainer.gpus=0"]),
        ((2, None, 1), True, 8, ["share_gpus=true needs topology.gpus_per_process: say how many of the 8 GPUs"]),
        ((2, 3, 1), True, 8, ["uses 6 of trainer.gpus=8", "Use trainer.gpus=6, or topology.procs_per_node=3 or more."]),
        ((8, 1, 2), True, 8, ["topology.gpus_per_process=1 is less than the model needs"]),
    ],
)
def test_a_topology_that_does_not_fit_says_what_does(settings, share, gpus, messages):
    with pytest.raises(TopologyError) as caught:
        resolve_topology(asked(*settings, share_gpus=share), gpus=gpus)
    assert [message for message in messages if message not in str(caught.value)] == []


@given(procs=OPTIONAL, span=OPTIONAL, least=st.integers(1, 3), gpus=st.integers(1, 9), share=st.booleans())
def test_every_suggestion_of_a_refusal_works(procs, span, least, gpus, share):
    """What a message says to use is accepted in place of what was given."""
    try:
        resolve_topology(asked(procs, span, least, share_gpus=share), gpus=gpus)
    except TopologyError as error:
        ways = re.findall(SHARE, str(error))
        for offered in ways:
            resolve_topology(asked(procs, int(offered), least, share_gpus=True), gpus=gpus)
        for offered in re.findall(FEWER, str(error)):
            resolve_topology(asked(procs, span, least, share_gpus=share), gpus=int(offered))
        for fewer, of in re.findall(PROCS, str(error)):
            resolve_topology(asked(int(fewer), span, least, share_gpus=share), gpus=int(of or gpus))
        for key, offered in re.findall(ONE_OF, str(error)):
            for number in map(int, offered.split(", ")):
                by_procs = key == "procs_per_node"
                chosen = asked(number if by_procs else procs, span if by_procs else number, least, share_gpus=share)
                resolve_topology(chosen, gpus=gpus)


def test_refusals_suggest_something():
    """Else the test above would have nothing to try."""
    said = []
    for procs, span, least, gpus in itertools.product((None, 1, 2, 3, 5), (None, 1, 2, 3), (1, 2, 3), range(1, 9)):
        try:
            resolve_topology(asked(procs, span, least), gpus=gpus)
        except TopologyError as error:
            said.append(str(error))
    assert [way for way in (SHARE, FEWER, PROCS, ONE_OF) if not any(re.search(way, text) for text in said)] == []


def test_places_that_do_not_exist_are_refused():
    topology = Topology(nnodes=2, procs_per_node=2, gpus_per_node=4, span=2)
    for wrong in (lambda: topology.rank_of(2, 0), lambda: topology.rank_of(0, 2), lambda: topology.device_indices(-1)):
        with pytest.raises(TopologyError, match="There is no"):
            wrong()


@given(st.integers(1, 200))
def test_divisors_are_all_that_divide(number):
    assert {d for d in range(1, number + 1) if number % d == 0} == set(divisors(number))
