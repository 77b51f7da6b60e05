from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from framework.data.batching import BatchPlan
from framework.data.sampler import (
    GlobalOrder,
    WindowIndices,
    epoch_indices,
    evaluation_indices,
    windows,
    windows_per_epoch,
)
from framework.errors import DataError
from framework.seed import mix

SIZES = st.integers(1, 257)
WORLD_SIZES = st.integers(1, 8)
ACCUMULATE = st.integers(1, 4)
GLOBAL_BATCH_SIZES = st.integers(1, 300)


def real_indices(window: WindowIndices) -> list[int]:
    return [index for micro in window.micro_batches if micro.num_samples for index in micro.indices.tolist()]


def dealt(order: GlobalOrder, plan: BatchPlan, **kwargs) -> list[list[WindowIndices]]:
    """Per step, what each rank gets."""
    indices = epoch_indices(order, plan, **kwargs)
    by_rank = [list(windows(indices, plan, rank=rank)) for rank in range(plan.world_size)]
    return [list(step) for step in zip(*by_rank, strict=True)]


@given(data=st.data(), size=SIZES, world_size=WORLD_SIZES, accumulate=ACCUMULATE, global_batch_size=GLOBAL_BATCH_SIZES)
def test_no_sample_is_lost_or_repeated_from_any_cursor(data, size, world_size, accumulate, global_batch_size):
    order, plan = GlobalOrder(size, seed=3, shuffle=True), BatchPlan(global_batch_size, accumulate, world_size)
    start = data.draw(st.integers(0, size - 1))
    steps = dealt(order, plan, epoch=2, start=start)

    seen = [index for step in steps for window in step for index in real_indices(window)]
    assert seen == order.indices(2)[start:].tolist()
    for step in steps:
        counts = [sum(micro.num_samples for micro in window.micro_batches) for window in step]
        assert {sum(counts)} == {window.global_count for window in step}
        assert len({len(window.micro_batches) for window in step}) == 1
    assert [[window.epoch_end for window in step] for step in steps] == [
        [number == len(steps)] * world_size for number in range(1, len(steps) + 1)
    ]


@given(size=SIZES, world_size=WORLD_SIZES, accumulate=ACCUMULATE, global_batch_size=GLOBAL_BATCH_SIZES)
def test_every_step_takes_the_same_samples_whatever_the_number_of_ranks(
    size, world_size, accumulate, global_batch_size
):
    order = GlobalOrder(size, seed=0, shuffle=True)
    alone = dealt(order, BatchPlan(global_batch_size, 1, 1), epoch=0)
    together = dealt(order, BatchPlan(global_batch_size, accumulate, world_size), epoch=0)
    assert [real_indices(window) for (window,) in alone] == [
        [index for window in step for index in real_indices(window)] for step in together
    ]


@given(size=SIZES, world_size=WORLD_SIZES, global_batch_size=GLOBAL_BATCH_SIZES)
def test_a_stand_in_is_one_sample_of_the_global_batch(size, world_size, global_batch_size):
    order, plan = GlobalOrder(size, seed=0, shuffle=True), BatchPlan(global_batch_size, 2, world_size)
    for step in dealt(order, plan, epoch=1):
        members = {index for window in step for index in real_indices(window)}
        for window in step:
            for micro in window.micro_batches:
                assert micro.indices.dtype == torch.int64
                assert len(micro.indices) == max(micro.num_samples, 1)
                assert set(micro.indices.tolist()) <= members


@given(
    size=SIZES, global_batch_size=GLOBAL_BATCH_SIZES, limit=st.integers(1, 20), world_size=WORLD_SIZES, data=st.data()
)
def test_a_limit_ends_the_epoch_after_so_many_global_batches(size, global_batch_size, limit, world_size, data):
    order, plan = GlobalOrder(size, seed=0, shuffle=False), BatchPlan(global_batch_size, 1, world_size)
    end = min(size, limit * global_batch_size)
    steps = dealt(order, plan, epoch=0, limit=limit)
    assert len(steps) == windows_per_epoch(order, plan, limit=limit) == min(limit, windows_per_epoch(order, plan))
    assert [index for step in steps for window in step for index in real_indices(window)] == list(range(end))

    start = data.draw(st.integers(0, end - 1))
    rest = dealt(order, plan, epoch=0, start=start, limit=limit)
    assert [index for step in rest for window in step for index in real_indices(window)] == list(range(start, end))


@pytest.mark.parametrize("start", [-1, 10, 11])
def test_a_cursor_outside_the_epoch_is_refused(start):
    order, plan = GlobalOrder(100, seed=0, shuffle=True), BatchPlan(5, 1, 1)
    with pytest.raises(DataError, match=rf"sample {start} of an epoch of 10 samples(.|\n)*limit_train_batches"):
        epoch_indices(order, plan, epoch=0, start=start, limit=2)


@given(size=SIZES, world_size=WORLD_SIZES)
def test_evaluation_takes_every_sample_once(size, world_size):
    parts = [evaluation_indices(size, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert torch.cat(parts).tolist() == list(range(size))


def test_an_order_is_a_permutation_that_seed_and_epoch_decide():
    orders = {
        (seed, epoch): tuple(GlobalOrder(100, seed, shuffle=True).indices(epoch).tolist())
        for seed in range(4)
        for epoch in range(4)
    }
    assert all(sorted(order) == list(range(100)) for order in orders.values())
    assert len(set(orders.values())) == len(orders)
    assert orders[0, 1] == tuple(GlobalOrder(100, 0, shuffle=True).indices(1).tolist())


def test_the_order_of_a_seed_stays_what_it_was():
    """A resumed run depends on it; only torch's generator may change it."""
    generator = torch.Generator().manual_seed(mix(7, "order", 3))
    assert GlobalOrder(50, 7, shuffle=True).indices(3).equal(torch.randperm(50, generator=generator))


def test_without_shuffling_the_samples_come_as_they_lie():
    assert GlobalOrder(5, seed=1, shuffle=False).indices(4).tolist() == [0, 1, 2, 3, 4]


def test_ordering_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    GlobalOrder(50, seed=0, shuffle=True).indices(0)
    assert torch.equal(torch.get_rng_state(), before)


class Allocated(TorchDispatchMode):
    """Elements of the tensors that are made; views cost none."""

    def __init__(self):
        super().__init__()
        self.elements = 0
        self._known: list[torch.Tensor] = []  # kept alive, so that no storage's address comes twice

    def __torch_dispatch__(self, call, types, args=(), kwargs=None):
        result = call(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            if all(result.untyped_storage().data_ptr() != known.untyped_storage().data_ptr() for known in self._known):
                self.elements += result.numel()
            self._known.append(result)
        return result


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_takes_no_more_memory_on_more_ranks(shuffle):
    """One order, of which every rank takes views."""
    size, taken = 4096, {}
    for world_size in (1, 8, 512):
        plan = BatchPlan(1024, 2, world_size)
        with Allocated() as allocated:
            indices = epoch_indices(GlobalOrder(size, seed=0, shuffle=shuffle), plan, epoch=0)
            for window in windows(indices, plan, rank=world_size - 1):
                assert window.global_count == 1024
        taken[world_size] = allocated.elements
    assert set(taken.values()) == {size}
