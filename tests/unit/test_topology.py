from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import chain, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.errors import TopologyError
from tests.helpers.internals import TopologyConfig, resolve_topology

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
NUMBERS = r"(\d+(?: or \d+)*)"


@given(procs=OPTIONAL, span=OPTIONAL, least=st.integers(1, 4), gpus=st.integers(0, 24))
def test_every_gpu_is_used_once(procs, span, least, gpus):
    settings = asked(procs, span, least)
    if not _possible(procs, span, least, gpus):
        with pytest.raises(TopologyError, match=r"topology\."):
            resolve_topology(settings, gpus=gpus)
        return
    topology = resolve_topology(settings, gpus=gpus)
    assert procs in (None, topology.procs_per_node)
    assert span in (None, topology.span)
    assert topology.span >= least
    owned = chain.from_iterable(map(topology.device_indices, range(topology.world_size)))
    assert list(owned) == list(range(gpus))
    assert topology.gpus_per_node == gpus
    assert not topology.shares_gpus
    for rank in range(topology.world_size):
        first = rank * topology.span
        assert topology.device_indices(rank) == (tuple(range(first, first + topology.span)) if gpus else ())


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
    uses = list(chain.from_iterable(map(topology.device_indices, range(topology.procs_per_node))))
    assert uses == [use % gpus for use in range(topology.procs_per_node * span)]
    assert set(uses) == set(range(gpus))
    assert topology.shares_gpus == (len(uses) > gpus)
    counts = [uses.count(gpu) for gpu in range(gpus)]
    assert max(counts) - min(counts) <= 1
    if procs is None:
        # There are no more processes than are needed.
        assert (topology.procs_per_node - 1) * span < gpus


def _possible(procs: int | None, span: int | None, least: int, gpus: int) -> bool:
    """Search all answers instead of applying rules."""
    if gpus == 0:
        return span is None or span >= least
    if span is not None:
        spans = [span]
    elif procs is None:
        spans = [least]
    else:
        spans = list(range(1, gpus + 1))
    numbers = [procs] if procs is not None else range(1, gpus + 1)
    return any(number * size == gpus and size >= least for number, size in product(numbers, spans))


@given(nnodes=st.integers(1, 5), procs=st.integers(1, 9), gpus=st.sampled_from([0, 1, 2]))
def test_ranks_are_numbered_node_by_node(nnodes, procs, gpus):
    settings = asked(procs, 1, 1, nnodes=nnodes, share_gpus=procs > gpus)
    topology = resolve_topology(settings, gpus=min(gpus, procs))
    ranks = [topology.rank_of(node, local) for node, local in product(range(nnodes), range(procs))]
    assert ranks == list(range(topology.world_size))
    assert topology.world_size == nnodes * procs


@dataclass(frozen=True, kw_only=True)
class Impossible:
    procs: int | None = None
    span: int | None = None
    least: int = 1
    share: bool = False
    gpus: int = 8
    messages: list[str]


@pytest.mark.parametrize(
    "case",
    [
        Impossible(
            procs=3,
            messages=["trainer.gpus=8 can't", "with topology.procs_per_node=3.\nUse trainer.gpus=3, "],
        ),
        Impossible(procs=3, messages=["or topology.procs_per_node=8 or 4 or 2 or 1."]),
        Impossible(procs=3, least=2, messages=["Use trainer.gpus=6, or topology.procs_per_node=4 or 2 or 1."]),
        Impossible(
            span=3,
            messages=["gpus_per_process=3.\nUse trainer.gpus=6, or topology.gpus_per_process=1 or 2 or "],
        ),
        Impossible(procs=2, span=3, messages=["Use trainer.gpus=6, or leave one of the two out (auto)."]),
        Impossible(span=1, least=2, messages=["topology.gpus_per_process=1 is less than the model needs"]),
        Impossible(
            procs=8,
            least=2,
            messages=["procs_per_node=8 and topology.min_gpus_per_process=2.\nUse trainer.gpus=16, or "],
        ),
        Impossible(
            procs=8,
            least=2,
            messages=["or topology.procs_per_node=4 or 2 or 1, or share GPUs: ", "trainer.gpus=0"],
        ),
        Impossible(least=2, gpus=5, messages=["Use trainer.gpus=4, or topology.procs_per_node=1."]),
        Impossible(
            procs=2,
            share=True,
            messages=["share_gpus=true needs topology.gpus_per_process: say how many of the 8 GPUs"],
        ),
        Impossible(
            procs=2,
            span=3,
            share=True,
            messages=["uses 6 of trainer.gpus=8", "Use trainer.gpus=6, or topology.procs_per_node=3 or more."],
        ),
    ],
)
def test_an_impossible_topology_is_refused_with_advice(case: Impossible):
    with pytest.raises(TopologyError) as caught:
        resolve_topology(asked(case.procs, case.span, case.least, share_gpus=case.share), gpus=case.gpus)
    assert [message for message in case.messages if message not in str(caught.value)] == []


@given(procs=OPTIONAL, span=OPTIONAL, least=st.integers(1, 3), gpus=st.integers(1, 9), share=st.booleans())
def test_every_suggestion_of_a_refusal_works(procs, span, least, gpus, share):
    """What a message says to use is accepted in place of what was given."""
    try:
        resolve_topology(asked(procs, span, least, share_gpus=share), gpus=gpus)
    except TopologyError as error:
        message = str(error)
        for offered in re.findall(SHARE, message):
            resolve_topology(asked(procs, int(offered), least, share_gpus=True), gpus=gpus)
        message = re.sub(SHARE, "", message)
        for offered in numbers("trainer.gpus", message):
            resolve_topology(asked(procs, span, least, share_gpus=share), gpus=offered)
        for offered in numbers("topology.procs_per_node", message):
            resolve_topology(asked(offered, span, least, share_gpus=share), gpus=gpus)
        for offered in numbers("topology.gpus_per_process", message):
            resolve_topology(asked(procs, offered, least, share_gpus=share), gpus=gpus)


def numbers(key: str, message: str) -> list[int]:
    """Return the values that the second line of a message says to use for a key."""
    found = re.search(rf"{re.escape(key)}={NUMBERS}", message.partition("\nUse ")[2])
    return [int(number) for number in re.findall(r"\d+", found[1])] if found else []
