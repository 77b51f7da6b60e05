"""What a batch of one process makes of an optimizer step."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from framework.data.batching import BatchPlan, micro_batches
from framework.errors import RunError
from framework.tune.dealing import Dealing

NUMBERS = st.integers(1, 300)


def test_a_batch_for_each_process() -> None:
    dealing = Dealing(world_size=2, accumulate=3, global_batch_size=None, samples=1000)
    assert dealing.most(None) == (166, "data")
    assert dealing.most(50) == (50, "tune.max_batch_size")
    assert dealing.most(5000) == (166, "data")
    assert dealing.trial(10) == BatchPlan(40, 2, 2)
    assert dealing.plan(10) == BatchPlan(60, 3, 2)
    assert dealing.overrides(10) == {"data.batch_size": 10}
    assert [dealing.whole_steps(dealing.plan(size)) for size in (10, 166, 200)] == [16, 1, 1]


def test_more_processes_than_the_data_has_passes_for() -> None:
    assert Dealing(world_size=4, accumulate=8, global_batch_size=None, samples=20).most(None) == (1, "data")


def test_a_global_batch_keeps_its_size() -> None:
    dealing = Dealing(world_size=2, accumulate=1, global_batch_size=100, samples=1000)
    assert dealing.most(None) == (50, "data.global_batch_size")
    assert dealing.plan(50) == BatchPlan(100, 1, 2)
    assert dealing.plan(40) == BatchPlan(100, 2, 2)
    assert (dealing.pass_size(40), dealing.trial(40)) == (25, BatchPlan(100, 2, 2))
    assert dealing.trial(10) == BatchPlan(40, 2, 2)
    assert dealing.overrides(10) == {"trainer.accumulate_grad_batches": 5}


def test_a_global_batch_of_more_than_the_data() -> None:
    dealing = Dealing(world_size=2, accumulate=1, global_batch_size=1600, samples=5)
    assert dealing.most(None) == (3, "data")
    assert dealing.overrides(3) == {"trainer.accumulate_grad_batches": 1}
    assert dealing.made(dealing.plan(3)) == (5, 1)
    # 266 would make one pass of 3 of them.
    assert (dealing.passes(2), dealing.made(dealing.plan(2))) == (267, (5, 2))
    assert [dealing.made(dealing.trial(size)) for size in (3, 2)] == [(5, 1), (5, 2)]


def test_accumulation_over_more_than_the_data() -> None:
    dealing = Dealing(world_size=2, accumulate=4, global_batch_size=None, samples=5)
    assert dealing.most(None) == (1, "data")
    assert dealing.made(dealing.plan(1)) == (5, 3)


@given(world=st.integers(1, 8), whole=NUMBERS, size=NUMBERS, samples=NUMBERS)
def test_no_pass_is_larger_than_what_fits(world: int, whole: int, size: int, samples: int) -> None:
    assume(whole >= world)
    dealing = Dealing(world_size=world, accumulate=1, global_batch_size=whole, samples=samples)
    assert dealing.pass_size(dealing.pass_size(size)) == dealing.pass_size(size)
    try:
        plan = dealing.plan(size)
    except RunError:
        assert dealing.passes(size) * world > whole
        return
    count = min(whole, samples)
    parts = [part for rank in range(world) for part in micro_batches(plan, global_count=count, rank=rank)]
    assert sum(map(len, parts)) == count
    assert max(map(len, parts)) == dealing.pass_size(size) <= size
    tried = dealing.trial(size)
    count = min(tried.global_batch_size, samples)
    assert max(map(len, micro_batches(tried, global_count=count, rank=0))) == dealing.pass_size(size)


def test_parts_that_cannot_be_dealt_are_refused() -> None:
    dealing = Dealing(world_size=4, accumulate=1, global_batch_size=10, samples=100)
    with pytest.raises(RunError, match=r"No more than 1 sample\(s\) fit, and data.global_batch_size=10 over 4"):
        dealing.plan(1)
