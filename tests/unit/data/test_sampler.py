"""One global order per epoch, split over ranks and micro-batches: every sample once, the same steps on any ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, product
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from framework.errors import ConfigError, DataError
from framework.types import MicroIndices
from tests.helpers.internals import (
    BatchPlan,
    EpochSizes,
    GlobalOrder,
    StreamPlan,
    WindowIndices,
    epoch_indices,
    mix_seeds,
    plan_batches,
    share,
    windows,
)

SIZES = st.integers(1, 257)
WORLD_SIZES = st.integers(1, 8)
PLANS = st.builds(BatchPlan, st.integers(1, 300), st.integers(1, 4), WORLD_SIZES)


def steps_of(order: GlobalOrder, plan: BatchPlan, **kwargs) -> list[list[WindowIndices]]:
    """Return per step what each rank gets."""
    indices = epoch_indices(order, plan, **kwargs)
    by_rank = [list(windows(indices, plan, rank=rank)) for rank in range(plan.world_size)]
    return [list(step) for step in zip(*by_rank, strict=True)]


def samples_of(step: list[WindowIndices]) -> list[int]:
    """Return the samples that count, in the order of ranks and micro-batches."""
    indices = []
    for micro in micro_batches_of(step):
        if micro.num_samples:
            indices += micro.indices.tolist()
    return indices


def micro_batches_of(step: list[WindowIndices]) -> Iterator[MicroIndices]:
    return chain.from_iterable(window.micro_batches for window in step)


def counts_of(step: list[WindowIndices]) -> list[list[int]]:
    """Return the numbers of samples of each rank's micro-batches."""
    counts = []
    for window in step:
        counts.append([micro.num_samples for micro in window.micro_batches])
    return counts


@given(data=st.data(), size=SIZES, plan=PLANS, shuffle=st.booleans(), limit=st.none() | st.integers(1, 20))
def test_every_sample_is_taken_once_from_any_cursor(data, size, plan, shuffle, limit):
    order = GlobalOrder(size, seed=3, shuffle=shuffle)
    end = size if limit is None else min(size, limit * plan.global_batch_size)
    start = data.draw(st.integers(0, end - 1))
    steps = steps_of(order, plan, epoch=2, start=start, limit=limit)

    assert list(chain.from_iterable(map(samples_of, steps))) == order.indices(2)[start:end].tolist()
    assert [len(samples_of(step)) for step in steps[:-1]] == [plan.global_batch_size] * (len(steps) - 1)
    for step in steps:
        assert {window.epoch_end for window in step} == {step is steps[-1]}
        counts = counts_of(step)
        totals = [sum(of_rank) for of_rank in counts]
        assert {window.global_count for window in step} == {sum(totals)}
        # The work is even, and every rank joins each exchange of gradients.
        assert max(totals) - min(totals) <= 1
        assert len({len(of_rank) for of_rank in counts}) == 1
        assert 1 <= len(counts[0]) <= plan.micro_batches
        assert all(max(of_rank) - min(of_rank) <= 1 for of_rank in counts)
        # No forward needs more memory than one of a full global batch.
        assert max(map(max, counts)) <= -(-plan.largest_share // plan.micro_batches)


@given(size=SIZES, plan=PLANS)
def test_a_step_takes_the_same_samples_everywhere(size, plan):
    order = GlobalOrder(size, seed=0, shuffle=True)
    alone = steps_of(order, BatchPlan(plan.global_batch_size, 1, 1), epoch=1)
    together = steps_of(order, plan, epoch=1)
    assert list(map(samples_of, alone)) == list(map(samples_of, together))
    # A rank without samples computes with one of the same global batch, at weight 0.
    for step in together:
        for micro in micro_batches_of(step):
            assert len(micro.indices) == max(micro.num_samples, 1)
            assert set(micro.indices.tolist()) <= set(samples_of(step))


@given(
    batch_size=st.integers(1, 64), world_size=WORLD_SIZES, accumulate=st.integers(1, 4), stage_cuts=st.integers(1, 3)
)
def test_batch_size_is_what_one_forward_takes(batch_size, world_size, accumulate, stage_cuts):
    ranks = {"world_size": world_size, "accumulate": accumulate}
    plan = plan_batches(batch_size=batch_size, global_batch_size=None, **ranks)
    assert plan == BatchPlan(batch_size * world_size * accumulate, accumulate, world_size)
    (step,) = steps_of(GlobalOrder(plan.global_batch_size, seed=0, shuffle=True), plan, epoch=0)
    assert counts_of(step) == [[batch_size] * accumulate] * world_size
    # The stages of a pipeline cut what a copy of the model takes at once; the global batch stays.
    cut = plan_batches(batch_size=batch_size, global_batch_size=None, cuts=stage_cuts, **ranks)
    assert cut == BatchPlan(plan.global_batch_size, accumulate * stage_cuts, world_size)


def test_a_global_batch_needs_samples_for_every_forward():
    plan = plan_batches(batch_size=1000, global_batch_size=50, world_size=4, accumulate=3)
    (step,) = steps_of(GlobalOrder(50, seed=0, shuffle=False), plan, epoch=0)
    assert counts_of(step) == [[5, 4, 4], [5, 4, 4], [4, 4, 4], [4, 4, 4]]
    for world_size, accumulate, cuts in ((4, 1, 1), (1, 4, 1), (2, 1, 2)):
        ranks: dict[str, Any] = {"world_size": world_size, "accumulate": accumulate, "cuts": cuts}
        with pytest.raises(ConfigError, match=r"global_batch_size=3 .* 4 forward passes(.|\n)*global_batch_size=4"):
            plan_batches(batch_size=1, global_batch_size=3, **ranks)
        assert plan_batches(batch_size=1, global_batch_size=4, **ranks).global_batch_size == 4


@given(data=st.data(), plan=PLANS)
def test_own_samples_make_no_empty_micro_batch(data, plan):
    """A rank that reads a stream of its own has at most its share of a global batch."""
    rank = data.draw(st.integers(0, plan.world_size - 1))
    plan = replace(plan, global_batch_size=max(plan.global_batch_size, plan.world_size * plan.micro_batches))
    full = len(share(plan.global_batch_size, rank=rank, world_size=plan.world_size))
    count = data.draw(st.integers(0, full))
    parts = StreamPlan("train", plan, rank, is_sharded=True).micro_batches(count, source=rank)
    assert list(chain.from_iterable(parts)) == list(range(count))
    assert len(parts) <= plan.micro_batches
    assert all(0 < len(part) <= -(-full // plan.micro_batches) for part in parts)


@pytest.mark.parametrize("start", [-1, 10, 11])
def test_a_cursor_outside_the_epoch_is_refused(start):
    order = GlobalOrder(100, seed=0, shuffle=True)
    plan = BatchPlan(5, 1, 1)
    with pytest.raises(DataError, match=rf"sample {start} of an epoch of 10 samples(.|\n)*limit_train_batches"):
        epoch_indices(order, plan, epoch=0, start=start, limit=2)


def test_seed_and_epoch_decide_the_permutation():
    before = torch.get_rng_state()
    orders = {}
    for seed, epoch in product(range(4), range(4)):
        orders[seed, epoch] = tuple(GlobalOrder(100, seed, shuffle=True).indices(epoch)[:].tolist())
    assert all(sorted(order) == list(range(100)) for order in orders.values())
    assert len(set(orders.values())) == len(orders)
    assert GlobalOrder(5, seed=1, shuffle=False).indices(4)[:].tolist() == [0, 1, 2, 3, 4]
    # Runs that were saved depend on it; only torch's own generator may change it.
    generator = torch.Generator().manual_seed(mix_seeds(2, "order", 3))
    assert orders[2, 3] == tuple(torch.randperm(100, generator=generator).tolist())
    assert torch.equal(torch.get_rng_state(), before)


class NumpyLength:
    def length(self, epoch: int) -> Any:
        return numpy.array([5, 7])[epoch]

    def order(self, generator: torch.Generator, *, batch_size: int) -> torch.Tensor:
        raise AssertionError("only its length is asked for")


def test_a_length_may_be_an_integer_of_numpy() -> None:
    sizes = EpochSizes(9, NumpyLength())
    assert type(sizes.of(1)) is int
    assert sizes.of(1) == 7
