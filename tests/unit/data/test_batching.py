from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.data.batching import BatchPlan, count_windows, micro_batches, own_micro_batches, plan_batches, share
from framework.errors import ConfigError

WORLD_SIZES = st.integers(1, 8)
ACCUMULATE = st.integers(1, 4)


@given(batch_size=st.integers(1, 64), world_size=WORLD_SIZES, accumulate=ACCUMULATE)
def test_batch_size_is_what_every_forward_pass_of_a_full_global_batch_takes(batch_size, world_size, accumulate):
    plan = plan_batches(batch_size=batch_size, global_batch_size=None, world_size=world_size, accumulate=accumulate)
    assert plan == BatchPlan(batch_size * world_size * accumulate, accumulate, world_size)
    for rank in range(world_size):
        parts = micro_batches(plan, global_count=plan.global_batch_size, rank=rank)
        assert [len(part) for part in parts] == [batch_size] * accumulate


def test_global_batch_size_wins_over_batch_size():
    plan = plan_batches(batch_size=1000, global_batch_size=50, world_size=4, accumulate=3)
    assert plan.global_batch_size == 50
    assert plan.largest_share == 13
    sizes = [[len(part) for part in micro_batches(plan, global_count=50, rank=rank)] for rank in range(4)]
    assert sizes == [[5, 4, 4], [5, 4, 4], [4, 4, 4], [4, 4, 4]]


@pytest.mark.parametrize(("world_size", "accumulate"), [(4, 1), (1, 4), (2, 2)])
def test_a_global_batch_with_less_than_a_sample_per_pass_is_refused(world_size, accumulate):
    with pytest.raises(ConfigError, match=r"global_batch_size=3 .* 4 forward passes(.|\n)*global_batch_size=4 or more"):
        plan_batches(batch_size=1, global_batch_size=3, world_size=world_size, accumulate=accumulate)
    plan = plan_batches(batch_size=1, global_batch_size=4, world_size=world_size, accumulate=accumulate)
    assert plan.global_batch_size == 4


@given(count=st.integers(0, 300), world_size=st.integers(1, 17))
def test_shares_are_contiguous_balanced_and_whole(count, world_size):
    shares = [share(count, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert [position for part in shares for position in part] == list(range(count))
    sizes = [len(part) for part in shares]
    assert max(sizes) - min(sizes) <= 1


@given(data=st.data(), global_batch_size=st.integers(1, 257), world_size=WORLD_SIZES, accumulate=ACCUMULATE)
def test_a_short_global_batch_is_dealt_whole_in_as_many_passes_on_every_rank(
    data, global_batch_size, world_size, accumulate
):
    plan = BatchPlan(global_batch_size, accumulate, world_size)
    global_count = data.draw(st.integers(1, global_batch_size))
    dealt = [micro_batches(plan, global_count=global_count, rank=rank) for rank in range(world_size)]

    assert [position for parts in dealt for part in parts for position in part] == list(range(global_count))
    assert len({len(parts) for parts in dealt}) == 1
    assert 1 <= len(dealt[0]) <= accumulate
    # Memory: no pass is larger than those of a full global batch.
    largest = -(-plan.largest_share // accumulate)
    assert all(len(part) <= largest for parts in dealt for part in parts)
    for parts in dealt:
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1


def test_a_short_global_batch_takes_no_more_passes_than_it_needs():
    plan = plan_batches(batch_size=20, global_batch_size=None, world_size=2, accumulate=3)
    sizes = [[len(part) for part in micro_batches(plan, global_count=41, rank=rank)] for rank in range(2)]
    assert sizes == [[11, 10], [10, 10]]


def test_a_rank_without_samples_still_has_a_pass():
    plan = plan_batches(batch_size=4, global_batch_size=None, world_size=3, accumulate=2)
    assert [len(part) for part in micro_batches(plan, global_count=1, rank=2)] == [0]


@pytest.mark.parametrize(("num_samples", "expected"), [(1, 1), (20, 1), (21, 2), (40, 2)])
def test_the_last_short_global_batch_counts_as_a_window(num_samples, expected):
    assert count_windows(num_samples, global_batch_size=20) == expected


@given(data=st.data(), global_batch_size=st.integers(1, 257), world_size=WORLD_SIZES, accumulate=ACCUMULATE)
def test_samples_of_a_rank_s_own_fill_no_more_passes_than_a_share_does(data, global_batch_size, world_size, accumulate):
    plan = BatchPlan(max(global_batch_size, world_size * accumulate), accumulate, world_size)
    rank = data.draw(st.integers(0, world_size - 1))
    full = len(share(plan.global_batch_size, rank=rank, world_size=world_size))
    whole = own_micro_batches(plan, count=full, rank=rank)
    assert len(whole) == accumulate
    count = data.draw(st.integers(0, full))
    parts = own_micro_batches(plan, count=count, rank=rank)
    assert [position for part in parts for position in part] == list(range(count))
    assert len(parts) <= accumulate
    assert all(0 < len(part) <= max(map(len, whole)) for part in parts)
