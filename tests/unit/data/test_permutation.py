"""The shuffled order of many samples, which is computed where it is read: a permutation without visible structure."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.internals import BatchPlan, GlobalOrder, Permutation, epoch_indices, in_order, shuffled, windows

MANY = 2**26


def permutation(size: int, seed: int = 0) -> Permutation:
    return Permutation(size, torch.Generator().manual_seed(seed))


@given(size=st.integers(1, 3000) | st.sampled_from([2**k + d for k in (2, 5, 11) for d in (-1, 0, 1)]), data=st.data())
def test_every_sample_is_there_once_in_any_slices(size, data):
    order = permutation(size, seed=size)
    whole = order[0:size]
    assert len(order) == size
    assert whole.dtype == torch.int64
    assert torch.equal(whole.sort().values, torch.arange(size))
    begin = data.draw(st.integers(0, size - 1))
    end = data.draw(st.integers(begin, size))
    assert torch.equal(order[begin:end], whole[begin:end])


def test_every_permutation_of_four_is_drawn_about_as_often():
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(4800):
        order = tuple(permutation(4, seed)[0:4].tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    # 200 each, with a standard deviation of 14.
    assert min(counts.values()) > 130
    assert max(counts.values()) < 270


@pytest.mark.parametrize("size", [MANY, 100_000_007, 2**31 + 1])
def test_neighbours_and_batches_look_random(size):
    number = 2**20
    for seed, begin in ((0, 0), (1, size // 2), (2, size - number)):
        order = permutation(size, seed)[begin : begin + number]
        assert len(order.unique()) == number
        # Uniform on [0, 1), with variance 1/12; every sum below is standard normal.
        places = (order.double() + 0.5) / size
        centred = (places - 0.5) * math.sqrt(12)
        for lag in (1, 2, 3, 7, 64, 4096):
            correlation = (centred[:-lag] * centred[lag:]).sum() / math.sqrt(number - lag)
            assert abs(correlation) < 5, lag
        for batch_size in (32, 512, 4096):
            means = centred.view(-1, batch_size).mean(1) * math.sqrt(batch_size)
            assert abs(means.mean()) * math.sqrt(len(means)) < 5
            # The variance of the means has a relative standard deviation of sqrt(2 / n).
            assert abs(means.var() - 1) < 5 * math.sqrt(2 / len(means))
        # Low and high bits, and the steps between neighbours.
        for bit in range((size - 1).bit_length() - 1):
            ones = ((order >> bit) & 1).double().mean()
            assert abs(ones - 0.5) < 5 * 0.5 / math.sqrt(number) + 2**bit / size, bit
        rises = (order[1:] > order[:-1]).double().mean()
        assert abs(rises - 0.5) < 5 / math.sqrt(12 * number)


def test_epochs_are_unrelated():
    orders = [permutation(MANY, seed)[0 : 2**18].double() for seed in range(4)]
    correlations = torch.corrcoef(torch.stack(orders)).fill_diagonal_(0)
    assert correlations.abs().max() < 5 / 2**9


def test_only_large_orders_are_computed_where_they_are_read():
    for size in (1, 1000):
        generator = torch.Generator().manual_seed(3)
        expected = torch.randperm(size, generator=torch.Generator().manual_seed(3))
        assert torch.equal(shuffled(size, generator)[:], expected)
        assert torch.equal(in_order(size)[:], torch.arange(size))
    assert isinstance(shuffled(MANY, torch.Generator()), Permutation)
    assert torch.equal(in_order(MANY)[MANY - 3 : MANY], torch.arange(MANY - 3, MANY))


@pytest.mark.parametrize("shuffle", [True, False])
def test_ranks_share_an_order_that_is_computed(shuffle):
    order = GlobalOrder(MANY + 11, seed=1, shuffle=shuffle)
    start = MANY - 989
    (left,) = windows_of(order, BatchPlan(300, 1, 1), start=start)
    parts = windows_of(order, BatchPlan(300, 2, 3), start=start)
    steps = []
    for of_ranks in zip(*parts, strict=True):
        steps.append([index for step in of_ranks for index in step])
    assert steps == left
    assert [len(step) for step in steps] == [300, 300, 300, 100]


def windows_of(order, plan, *, start):
    """Return the samples of each step, by rank."""
    indices = order.indices(0)
    assert torch.equal(epoch_indices(order, plan, epoch=0, start=start), indices[start : len(indices)])
    by_rank = []
    for rank in range(plan.world_size):
        steps = []
        for window in windows(indices, plan, rank=rank, start=start):
            steps.append(torch.cat([micro.indices for micro in window.micro_batches]).tolist())
        by_rank.append(steps)
    return by_rank
