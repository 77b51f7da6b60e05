from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

from framework import TensorSamples
from framework.data import gathering, prefetch
from framework.data.batching import BatchPlan
from framework.data.loader import TrainLoader
from framework.data.sampler import GlobalOrder

CPU = torch.device("cpu")


def noisy(batch, draws):
    return [batch[0] + draws.uniform(batch[0].shape[1]), batch[1]]


def samples(size, *, width=3, transform=noisy):
    x = torch.randn(size, width, generator=torch.Generator().manual_seed(0))
    return TensorSamples(x, torch.arange(size, dtype=torch.int32), transform=transform)


def loader(dataset, plan, *, rank=0):
    return TrainLoader(dataset, order=GlobalOrder(len(dataset), seed=2, shuffle=True), plan=plan, rank=rank, device=CPU)


def taken(train_loader, **cursor):
    """Everything about every window."""
    found = []
    for window in train_loader.epoch(1, **cursor):
        micros = [(micro.num_samples, [t.tolist() for t in micro.batch]) for micro in window.micro_batches]
        indices = [(each.indices.tolist(), each.num_samples) for each in window.indices]
        found.append((micros, indices, window.num_micro_batches, window.global_count, window.epoch_end))
    return found


@settings(deadline=None, max_examples=40)
@given(
    size=st.integers(8, 90),
    world_size=st.integers(1, 3),
    accumulate=st.integers(1, 3),
    batch=st.integers(1, 5),
    extra=st.integers(0, 2),
    start=st.integers(0, 7),
)
def test_windows_gathered_together_are_those_gathered_one_by_one(size, world_size, accumulate, batch, extra, start):
    plan = BatchPlan(batch * world_size * accumulate + extra, accumulate, world_size)
    dataset = samples(size)
    for rank in range(world_size):
        several, single = loader(dataset, plan, rank=rank), loader(dataset, plan, rank=rank)
        assert several._gatherer is not None
        assert several._gatherer.windows_at_once > 1
        single._gatherer = None
        assert taken(several, start=start) == taken(single, start=start)


def test_every_batch_begins_where_memory_is_aligned_and_is_dense():
    for train_loader in (loader(samples(100, width=width), BatchPlan(7, 2, 1)) for width in (1, 3, 16)):
        for window in train_loader.epoch(0):
            for micro in window.micro_batches:
                assert all(tensor.data_ptr() % 64 == 0 and tensor.is_contiguous() for tensor in micro.batch)


def test_large_windows_are_gathered_one_micro_batch_at_a_time(monkeypatch):
    monkeypatch.setattr(gathering, "MOST_BYTES", 500)
    train_loader = loader(samples(100), BatchPlan(40, 4, 1))
    assert train_loader._gatherer is not None
    assert train_loader._gatherer.windows_at_once == 0
    assert [len(window[0]) for window in taken(train_loader)] == [4, 4, 2]


VIEWS = ("view", "slice", "unbind", "split", "detach")


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, call, types, args=(), kwargs=None):
        self.seen[call.overloadpacket.__name__] += 1
        return call(*args, **(kwargs or {}))


def test_a_small_window_costs_a_part_of_an_operation():
    train_loader = loader(samples(1280, transform=None), BatchPlan(20, 1, 1))
    with Operations() as operations:
        assert sum(1 for window in train_loader.epoch(0) for _ in window.micro_batches) == 64
    made = {name: count for name, count in operations.seen.items() if name not in VIEWS}
    assert sum(made.values()) <= 12, made


class Noted:
    """A stand-in for streams, of which there is none here."""

    begun = 0

    def __init__(self, device):
        self.device = device

    def begin(self, batch):
        Noted.begun += 1
        return batch

    def hand_over(self, ticket):
        return ticket


@pytest.mark.parametrize("plan", [BatchPlan(8, 2, 1), BatchPlan(9, 1, 2)])
def test_rows_on_the_host_are_copied_ahead_and_are_the_same(monkeypatch, plan):
    dataset = samples(1000)
    wanted = taken(loader(dataset, plan))
    monkeypatch.setattr(prefetch, "SideStream", Noted)
    monkeypatch.setattr(prefetch, "pins_memory", lambda _: True)
    monkeypatch.setattr(Noted, "begun", 0)
    elsewhere = loader(dataset, plan)
    assert elsewhere._gatherer is not None
    elsewhere._gatherer._source._is_there = False
    assert taken(elsewhere) == wanted
    assert Noted.begun >= 2


def test_large_rows_of_an_odd_size_are_not_filled_up():
    images = torch.zeros(100, 1, 31, 67, dtype=torch.uint8)
    gatherer = loader(TensorSamples(images), BatchPlan(4, 1, 1))._gatherer
    assert gatherer is None or gatherer.windows_at_once == 0


def test_a_batch_may_be_changed_in_place_and_kept_for_its_graph():
    train_loader = loader(samples(40, transform=None), BatchPlan(4, 1, 1))
    weight = torch.ones(3, requires_grad=True)
    losses = []
    before = [micro.batch[0].clone() for window in train_loader.epoch(0) for micro in window.micro_batches]
    for window in train_loader.epoch(0):
        for micro in window.micro_batches:
            micro.batch[0].add_(1)
            micro.batch[0].mul_(weight)
            losses.append(micro.batch[0].sum())
    torch.stack(losses).sum().backward()
    expected = torch.cat(before).sum(0) + 40
    torch.testing.assert_close(weight.grad, expected)


def test_data_that_requires_gradients_does_not_hang_on_one_graph():
    dataset = TensorDataset(torch.ones(40, 3, requires_grad=True), torch.arange(40))
    for window in loader(dataset, BatchPlan(4, 1, 1)).epoch(0):
        assert [micro.batch[0].requires_grad for micro in window.micro_batches] == [False]
