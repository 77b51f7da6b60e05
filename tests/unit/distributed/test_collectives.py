"""The collectives, and what is built on them, between real processes; alone they need no process group."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from framework.distributed.collectives import any_over_ranks, barrier, gather_to_all, sum_over_ranks
from framework.launch.warm import WarmServer
from tests.helpers.ranks import left_by_ranks
from tests.unit.simulated_ranks import cpu_context

Run = Callable[..., list[Any]]
SIZES = (1, 2, 3, 22, 23)


@pytest.fixture
def run(warm: WarmServer, tmp_path: Path) -> Run:
    """Runs an entry on `procs` ranks; gives what each left."""

    def call(entry: str, *, procs: int) -> list[Any]:
        return left_by_ranks(f"tests.multiproc.collective_entries:{entry}", procs=procs, warm=warm, folder=tmp_path)

    return call


def test_alone_nothing_is_exchanged_and_no_group_is_needed() -> None:
    context, values = cpu_context(), torch.tensor([2.0, 3.0])
    assert not dist.is_initialized()
    assert sum_over_ranks(values, context) is values
    assert values.tolist() == [2.0, 3.0]
    assert [any_over_ranks(flag, context) for flag in (True, False)] == [True, False]
    assert gather_to_all({"some": "thing"}, context) == [{"some": "thing"}]
    barrier(context)


@pytest.mark.multiproc
@pytest.mark.parametrize("procs", [2, 3])
def test_every_collective_does_what_it_says(run: Run, procs: int) -> None:
    assert run("collectives", procs=procs) == ["done"] * procs


@pytest.mark.multiproc
def test_meters_add_up_over_processes_and_refuse_differing_names(run: Run) -> None:
    zero, one = run("reduce_meters", procs=2)
    assert zero == one
    assert zero["values"] == {"loss": 1.0, "right": 0.5}
    assert zero["bad"] == 5
    assert "rank 0 has ['loss'], others ['loss', 'more']" in zero["error"]


@pytest.mark.multiproc
@pytest.mark.parametrize("procs", [2, 3])
def test_an_evaluation_counts_every_sample_once_over_processes(run: Run, procs: int) -> None:
    ends = run("evaluate_shares", procs=procs)
    assert all(end == ends[0] for end in ends)
    for size in SIZES:
        exact = sum(number**2 for number in range(size)) / size
        assert ends[0][str(size)]["val/square"] == exact
        assert ends[0][str(size)]["val/loss"] == pytest.approx(exact, rel=1e-15)


@pytest.mark.multiproc
def test_an_evaluation_is_of_the_weights_that_are_saved_also_with_running_statistics(run: Run) -> None:
    (together, saved), _ = run("evaluate_buffers", procs=2)
    assert together == pytest.approx(saved)
