from __future__ import annotations

import os
import signal
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from framework.config.schema import LoaderKind
from framework.data.batching import plan_batches
from framework.data.choosing import Loading
from framework.data.loader import EvalLoader, TrainLoader, dataset_size
from framework.data.sampler import GlobalOrder
from framework.errors import DataError, RunError

CPU = torch.device("cpu")
# torch's DataLoader sets a handler for SIGCHLD when it first starts workers.
with_workers = pytest.mark.usefixtures("own_state")


class Rows(Dataset):
    """The samples of a TensorDataset, without being one."""

    def __init__(self, inner, *, broken: int | None = None):
        self.inner = inner
        self.broken = broken
        self.loaded: list[int] = []

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        if index == self.broken:
            raise ValueError("bad image")
        self.loaded.append(index)
        return self.inner[index]


class Augmented(Dataset):
    """Random transforms: what the numbers of loader processes and ranks must not change."""

    def __len__(self):
        return 23

    def __getitem__(self, index):
        return index, torch.rand(2)


@pytest.fixture
def tensors():
    return TensorDataset(torch.randn(23, 4, generator=torch.Generator().manual_seed(0)), torch.arange(23))


def make_train(dataset, *, rank=0, world_size=1, batch_size=4, accumulate=1, shuffle=True, **kwargs) -> TrainLoader:
    plan = plan_batches(batch_size=batch_size, global_batch_size=None, world_size=world_size, accumulate=accumulate)
    order = GlobalOrder(len(dataset), seed=5, shuffle=shuffle)
    return TrainLoader(dataset, order=order, plan=plan, rank=rank, device=CPU, **kwargs)


def make_eval(dataset, *, rank=0, world_size=1, batch_size=4, **kwargs) -> EvalLoader:
    return EvalLoader(
        dataset, part="val", batch_size=batch_size, rank=rank, world_size=world_size, device=CPU, **kwargs
    )


def flat(windows):
    """Every micro-batch, with what its window says."""
    return [(micro, window[1:4]) for window in windows for micro in window.micro_batches]


def assert_equal(left, right):
    assert len(left) == len(right) > 0
    for (a, window_a), (b, window_b) in zip(left, right, strict=True):
        assert window_a == window_b
        assert a.num_samples == b.num_samples
        assert type(a.batch) is type(b.batch) is list
        for x, y in zip(a.batch, b.batch, strict=True):
            assert torch.equal(x, y)


def test_both_ways_without_workers_give_equal_batches(tensors):
    short, long = make_train(tensors, accumulate=2), make_train(Rows(tensors), accumulate=2)
    for epoch in range(2):
        assert_equal(flat(short.epoch(epoch)), flat(long.epoch(epoch)))


@with_workers
def test_workers_give_equal_batches_epoch_after_epoch_also_after_one_was_left_early(tensors):
    alone, workers = make_train(tensors), make_train(tensors, loading=Loading(num_workers=2))
    try:
        assert_equal(flat(alone.epoch(0)), flat(workers.epoch(0)))
        left_early = workers.epoch(1)
        assert next(next(left_early).micro_batches).num_samples == 4
        assert_equal(flat(alone.epoch(2, start=8)), flat(workers.epoch(2, start=8)))
        assert_equal(flat(alone.epoch(3)), flat(workers.epoch(3)))
    finally:
        workers.close()


@with_workers
def test_random_transforms_do_not_depend_on_workers_or_ranks():
    def drawn(loaders):
        try:
            batches = [micro.batch for loader in loaders for micro, _ in flat(loader.epoch(1)) if micro.num_samples]
        finally:
            for loader in loaders:
                loader.close()
        return {i: tuple(x) for index, draws in batches for i, x in zip(index.tolist(), draws.tolist(), strict=True)}

    before = torch.get_rng_state()
    expected = drawn([make_train(Augmented())])
    assert len(set(expected.values())) == 23
    assert drawn([make_train(Augmented(), loading=Loading(num_workers=1))]) == expected
    assert drawn([make_train(Augmented(), rank=rank, world_size=3) for rank in range(3)]) == expected
    assert torch.equal(torch.get_rng_state(), before)


def test_what_a_rank_gets_of_each_window(tensors):
    loaders = [make_train(tensors, rank=rank, world_size=2, accumulate=2, shuffle=False) for rank in range(2)]
    assert [len(loader) for loader in loaders] == [2, 2]
    assert loaders[0].global_batch_size == 16
    first, second = (
        [(micro.batch[1].tolist(), micro.num_samples, said) for micro, said in flat(loader.epoch(0))]
        for loader in loaders
    )
    full, last = (2, 16, False), (1, 7, True)
    assert first == [([0, 1, 2, 3], 4, full), ([4, 5, 6, 7], 4, full), ([16, 17, 18, 19], 4, last)]
    assert second == [([8, 9, 10, 11], 4, full), ([12, 13, 14, 15], 4, full), ([20, 21, 22], 3, last)]


def test_a_rank_without_samples_gets_a_stand_in(tensors):
    loader = make_train(Subset(tensors, range(9)), rank=1, world_size=2, batch_size=4, shuffle=False)
    (stand_in, said) = flat(loader.epoch(0))[-1]
    assert (stand_in.num_samples, stand_in.batch[1].tolist(), said) == (0, [8], (1, 1, True))


def test_starting_at_a_cursor_skips_without_loading_and_loading_waits_until_asked(tensors):
    rows = Rows(tensors)
    loader = make_train(rows, shuffle=False)
    windows = loader.epoch(0, start=12)
    window = next(windows)
    assert rows.loaded == []
    (micro,) = window.micro_batches
    assert rows.loaded == micro.batch[1].tolist() == [12, 13, 14, 15]
    assert [micro.batch[1].tolist() for micro, _ in flat(windows)] == [[16, 17, 18, 19], [20, 21, 22]]


def test_a_limit_shortens_the_epoch(tensors):
    loader = make_train(tensors, limit=2)
    assert len(loader) == 2
    windows = list(flat(loader.epoch(0)))
    assert [said for _, said in windows] == [(1, 4, False), (1, 4, True)]


@pytest.mark.parametrize(("shuffle", "loaded"), [(False, set(range(8))), (True, set(range(23)))])
def test_only_what_a_limit_leaves_is_decoded_where_every_epoch_takes_the_same(tensors, shuffle, loaded):
    rows, resident = Rows(tensors), Loading(LoaderKind.RESIDENT)
    loader = make_train(rows, limit=2, shuffle=shuffle, loading=resident)
    assert set(rows.loaded) == loaded
    assert len(loader) == 2
    plain = make_train(tensors, limit=2, shuffle=shuffle)
    for epoch in range(2):
        assert_equal(flat(loader.epoch(epoch)), flat(plain.epoch(epoch)))


def test_a_window_that_was_not_used_up_is_a_mistake(tensors):
    windows = make_train(tensors).epoch(0)
    next(windows)
    with pytest.raises(AssertionError, match="not all taken"):
        next(windows)


@with_workers
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sample_that_raises_is_named_in_the_same_words(tensors, num_workers):
    loader = make_train(Rows(tensors, broken=5), shuffle=False, loading=Loading(num_workers=num_workers))
    with pytest.raises(
        RunError, match=r"\ASample 5 of the train dataset raised ValueError: bad image\n  /.*test_loader.py, line"
    ):
        flat(loader.epoch(0))
    loader.close()


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_evaluation_loads_every_sample_once(tensors, world_size):
    loaders = [make_eval(tensors, rank=rank, world_size=world_size) for rank in range(world_size)]
    batches = [micro for loader in loaders for micro in loader]
    assert torch.cat([micro.batch[1] for micro in batches]).tolist() == list(range(23))
    assert all(micro.num_samples == len(micro.batch[0]) <= 4 for micro in batches)
    assert sum(len(loader) for loader in loaders) == len(batches)


def test_evaluation_of_a_rank_without_samples_is_empty(tensors):
    loader = make_eval(Subset(tensors, [0, 1]), rank=2, world_size=3)
    assert len(loader) == 0
    assert list(loader) == []


@with_workers
def test_evaluation_with_workers_is_the_same_every_time():
    loader, alone = make_eval(Augmented(), loading=Loading(num_workers=2)), make_eval(Augmented())
    try:
        for _ in range(2):
            for a, b in zip(loader, alone, strict=True):
                assert a.num_samples == b.num_samples
                assert torch.equal(a.batch[1], b.batch[1])
    finally:
        loader.close()


@with_workers
def test_closing_ends_the_workers_and_using_them_afterwards_is_refused(tensors):
    loader = make_train(tensors, loading=Loading(num_workers=1))
    flat(loader.epoch(0))
    loader.close()
    loader.close()
    with pytest.raises(RuntimeError, match="closed"):
        flat(loader.epoch(1))


class WorkerPid(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor([os.getpid()])


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="the kernel ends orphans at request on Linux only")
def test_workers_end_with_the_process_they_load_for():
    """A child loads with workers and is killed: nothing may be left that could end them in an orderly way."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            loader = make_eval(WorkerPid(), batch_size=1, loading=Loading(num_workers=2))
            pids = {int(micro.batch.item()) for micro in loader}
            os.write(writer, " ".join(map(str, pids)).encode())
            signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    workers = [int(pid) for pid in os.read(reader, 1000).split()]
    os.close(reader)
    assert len(workers) == 2
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    deadline = time.monotonic() + 3  # torch's own watchdog looks every 5 s
    while (alive := [pid for pid in workers if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert alive == []


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_an_empty_dataset_is_refused():
    empty = TensorDataset(torch.zeros(0, 3))
    with pytest.raises(DataError, match="train dataset is empty"):
        make_train(empty)
    with pytest.raises(DataError, match="val dataset is empty"):
        make_eval(empty)


def test_training_data_with_less_than_a_sample_per_process_are_refused(tensors):
    with pytest.raises(DataError, match="3 samples for 4 processes"):
        make_train(Subset(tensors, range(3)), world_size=4)


def test_a_dataset_that_is_not_map_style_is_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(())

        def __len__(self):
            return 3

    wrong: list[Any] = [Stream(), iter([])]
    for dataset in wrong:
        with pytest.raises(DataError, match="isn't map-style"):
            dataset_size(dataset, part="test")


def test_the_order_must_be_of_the_dataset(tensors):
    plan = plan_batches(batch_size=4, global_batch_size=None, world_size=1, accumulate=1)
    with pytest.raises(ValueError, match="order is of 22 samples, the dataset has 23"):
        TrainLoader(tensors, order=GlobalOrder(22, seed=0, shuffle=True), plan=plan, rank=0, device=CPU)


def test_epochs_come_in_different_orders(tensors):
    loader = make_train(tensors)
    orders = [tuple(torch.cat([micro.batch[1] for micro, _ in flat(loader.epoch(e))]).tolist()) for e in range(3)]
    assert all(a != b for a, b in pairwise(orders))


@with_workers
@pytest.mark.parametrize("how", ["tensors", "samples", "workers"])
def test_another_plan_deals_the_same_samples(tensors, how):
    """As a loader made for it would; after one that was left in the midst of a window."""
    dataset, loading = (tensors, Loading()) if how == "tensors" else (Rows(tensors), Loading(LoaderKind.DATALOADER, 0))
    if how == "workers":
        loading = Loading(LoaderKind.DATALOADER, 1)
    loader = make_train(dataset, batch_size=2, loading=loading)
    try:
        left: Any = loader.epoch(0)
        next(next(left).micro_batches)
        left.close()
        plan = plan_batches(batch_size=3, global_batch_size=None, world_size=1, accumulate=2)
        assert_equal(
            flat(loader.replanned(plan).epoch(1)), flat(make_train(tensors, batch_size=3, accumulate=2).epoch(1))
        )
        assert [len(loader.replanned(plan, limit=limit)) for limit in (None, 2)] == [4, 2]
        assert_equal(flat(loader.epoch(0)), flat(make_train(tensors, batch_size=2).epoch(0)))
    finally:
        loader.close()
