"""The batches of a rank are those of a plain loop over the dataset, whichever way they are loaded."""

from __future__ import annotations

import ctypes
import os
import random
import signal
from collections import OrderedDict
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten
from torch.utils.data import ConcatDataset, Subset, TensorDataset, default_collate

from framework import TensorSamples
from framework.errors import DataError, RunError
from tests.helpers.internals import (
    EvalLoader,
    GlobalOrder,
    LoaderOptions,
    MapLoader,
    dataset_size,
    plan_batches,
    prefetch,
    to_device,
)
from tests.helpers.loaders import Made, eval_loader, micro_batches

CPU = torch.device("cpu")
META = torch.device("meta")
# torch's DataLoader sets a handler for SIGCHLD when it first starts workers.
pytestmark = pytest.mark.usefixtures("own_state")

SIZE = 200
X = torch.randn(SIZE, 3, generator=torch.Generator().manual_seed(0))
LABEL = torch.arange(SIZE)
TENSORS = TensorDataset(X, LABEL)
IN_PROCESS = LoaderOptions("dataloader", 0)
WORKERS = LoaderOptions("dataloader", 1)
RESIDENT = LoaderOptions("resident")


class Doubled(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        return tuple(2 * tensor for tensor in super().__getitem__(index))


def make_train(
    dataset: Any, *, rank=0, world_size=1, batch_size=4, accumulate=1, shuffle=True, seed=5, **kwargs
) -> MapLoader:
    plan = plan_batches(batch_size=batch_size, global_batch_size=None, world_size=world_size, accumulate=accumulate)
    how = {"seed": seed, "shuffle": shuffle, **kwargs}
    return MapLoader(dataset, split="train", plan=plan, rank=rank, device=CPU, **how)


def make_eval(dataset: Any, **kwargs: Any) -> EvalLoader:
    return eval_loader(dataset, batch_size=4, **kwargs)


def assert_same_batch(given: Any, wanted: Any) -> None:
    (mine, spec) = tree_flatten(given)
    (others, wanted_spec) = tree_flatten(wanted)
    assert spec == wanted_spec
    for one, other in zip(mine, others, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def epoch_of(loaders: list[MapLoader], epoch: int, start: int = 0, *, dataset: Any) -> list[list[int]]:
    """Return the samples of each step, over all ranks, after comparing every batch with the dataset's own samples."""
    steps = []
    for windows in zip(*(loader.epoch(epoch, start) for loader in loaders), strict=True):
        step: list[int] = []
        for window in windows:
            assert window.num_micro_batches == len(window.indices)
            for micro, (indices, count) in zip(window.micro_batches, window.indices, strict=True):
                assert micro.num_samples == count
                assert_same_batch(micro.batch, default_collate([dataset[i] for i in indices.tolist()]))
                # So that kernels choose the same way as with memory of a batch's own.
                leaves = [leaf for leaf in tree_flatten(micro.batch)[0] if isinstance(leaf, Tensor)]
                assert all(leaf.data_ptr() % 64 == 0 and leaf.is_contiguous() for leaf in leaves)
                step += indices.tolist()[:count]
        assert {window.global_count for window in windows} == {len(step)}
        steps.append(step)
    return steps


WAYS: dict[str, tuple[Any, LoaderOptions]] = {
    "tensors": (TENSORS, LoaderOptions()),
    "one by one": (Made(TENSORS.__getitem__, SIZE), IN_PROCESS),
    "workers": (Made(TENSORS.__getitem__, SIZE), WORKERS),
    "decoded": (
        Made(lambda i: {"x": (np.arange(3) + i, np.float32(i)), "i": i, "b": torch.tensor(i > 9)}, SIZE),
        RESIDENT,
    ),
    "subset": (Subset(Subset(TENSORS, range(0, SIZE, 2)), [99, -1, *range(40)]), LoaderOptions()),
    "rows": (
        TensorSamples(X, LABEL, rows=LABEL.flip(0)[:90], transform=lambda b, _: [2 * b[0], b[1]]),
        LoaderOptions(),
    ),
    "joined": (ConcatDataset([TENSORS, Doubled(X, LABEL)]), IN_PROCESS),
    "wide rows": (TensorDataset(torch.arange(60 * 3001.0).view(60, 3001), torch.arange(60)), LoaderOptions()),
}


ALONE = (1, 1, 2)
TOGETHER = (3, 2, 3)


@pytest.mark.parametrize(
    ("way", "plan"), [*((way, TOGETHER) for way in WAYS), ("tensors", ALONE), ("one by one", ALONE)]
)
def test_batches_are_those_of_a_plain_loop(way: str, plan: tuple[int, int, int]) -> None:
    """Every sample once per epoch in the global order; also from a cursor, and after an epoch that was left early."""
    (dataset, loading) = WAYS[way]
    (world_size, accumulate, batch_size) = plan
    size = len(dataset)
    global_batch = world_size * accumulate * batch_size
    how = {"world_size": world_size, "accumulate": accumulate, "batch_size": batch_size, "options": loading}
    loaders = [make_train(dataset, rank=rank, **how) for rank in range(world_size)]
    try:
        for epoch, start in ((0, 0), (1, 0), (2, 2 * global_batch), (2, size - 1)):
            order = GlobalOrder(size, seed=5, shuffle=True).indices(epoch)[start:]
            wanted = [batch.tolist() for batch in order.split(global_batch)]
            assert epoch_of(loaders, epoch, start, dataset=dataset) == wanted
            for loader in loaders:
                left: Any = loader.epoch(epoch + 5)
                next(next(left).micro_batches)
                left.close()
        assert [loader.steps.constant for loader in loaders] == [-(-size // global_batch)] * world_size
        for loader in loaders:
            ends = [window.epoch_end for window in taken(loader.epoch(0))]
            assert ends == [False] * (loaders[0].steps.of(0) - 1) + [True]
    finally:
        for loader in loaders:
            loader.close()


def taken(windows: Any) -> Any:
    """The windows, each with its micro-batches taken."""
    for window in windows:
        list(window.micro_batches)
        yield window


def noisy(batch, draws):
    return [batch[0], torch.cat([draws.uniform(2), draws.integers(0, 1 << 30, 1)], dim=1)]


def draw(index: int) -> tuple[Any, ...]:
    return index, (torch.rand(1), random.random(), np.random.rand())


def drawn(
    dataset: Any, loading: LoaderOptions, *, world_size=1, batch_size=4, epoch=1, start=0, seed=5
) -> dict[int, Any]:
    """Return what each sample drew, by its index."""
    found: dict[int, Any] = {}
    for rank in range(world_size):
        loader = make_train(
            dataset, rank=rank, world_size=world_size, batch_size=batch_size, seed=seed, options=loading
        )
        for window in loader.epoch(epoch, start):
            for index, numbers in (micro.batch for micro in window.micro_batches if micro.num_samples):
                columns = numbers
                if isinstance(numbers, list):
                    columns = torch.stack([column.flatten() for column in numbers], 1)
                found |= dict(zip(index.tolist(), map(tuple, columns.tolist()), strict=True))
        loader.close()
    return found


BY_BATCH = TensorSamples(torch.arange(23), torch.zeros(23), transform=noisy)
PARTS = [TensorSamples(torch.arange(10), torch.zeros(10), transform=noisy)]
PARTS.append(TensorSamples(torch.arange(10, 23), torch.zeros(13), transform=noisy))


@pytest.mark.parametrize(
    ("dataset", "loading", "other"),
    [
        (Made(draw, 23), IN_PROCESS, WORKERS),
        (BY_BATCH, LoaderOptions(), WORKERS),
        (ConcatDataset(PARTS), IN_PROCESS, WORKERS),
    ],
    ids=["samples", "batches", "joined"],
)
def test_transforms_depend_on_seed_epoch_and_position(dataset, loading, other):
    """Ranks, workers and the sample's batch have no influence. Torch's own generators don't change."""
    before = random.getstate(), torch.get_rng_state().tolist(), np.random.get_state(legacy=False)["state"]
    wanted = drawn(dataset, loading)
    assert len(wanted) == len(set(wanted.values())) == 23
    assert drawn(dataset, loading, world_size=3) == wanted
    assert drawn(dataset, loading, batch_size=23) == wanted
    assert drawn(dataset, other) == wanted
    rest = drawn(dataset, loading, start=8)
    assert rest == {index: wanted[index] for index in rest}
    for changed in (drawn(dataset, loading, epoch=2), drawn(dataset, loading, seed=6)):
        assert not set(changed.values()) & set(wanted.values())
    after = random.getstate(), torch.get_rng_state().tolist(), np.random.get_state(legacy=False)["state"]
    assert before[:2] == after[:2]
    np.testing.assert_equal(after[2], before[2])


@pytest.mark.parametrize("is_even", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_evaluation_loads_every_sample_once(world_size, is_even):
    for size in (2, 23):
        loaders = [
            make_eval(Subset(TENSORS, range(size)), rank=rank, world_size=world_size, is_even=is_even)
            for rank in range(world_size)
        ]
        batches = [list(loader) for loader in loaders]
        if is_even:
            assert len({len(found) for found in batches}) == 1
        counted = [micro for micro in chain.from_iterable(batches) if micro.num_samples]
        stand_ins = [micro for micro in chain.from_iterable(batches) if not micro.num_samples]
        assert sorted(torch.cat([micro.batch[1] for micro in counted]).tolist()) == list(range(size))
        in_turn = [micro for micro in chain.from_iterable(zip_longest(*batches)) if micro and micro.num_samples]
        assert torch.cat([micro.batch[1] for micro in in_turn]).tolist() == list(range(size))
        assert all(micro.num_samples == len(micro.batch[0]) <= 4 for micro in counted)
        assert all(len(micro.batch[0]) == 1 for micro in stand_ins)
        (first,) = list(loaders[0].first(1))
        assert_same_batch(first.batch, batches[0][0].batch)


def test_evaluation_draws_the_same_every_time():
    loaders = [make_eval(Made(draw, 23), options=loading) for loading in (IN_PROCESS, IN_PROCESS, WORKERS)]
    wanted = list(loaders[0])
    for loader in (loaders[0], *loaders[1:]):
        for one, other in zip(loader, wanted, strict=True):
            assert_same_batch(one.batch, other.batch)
        loader.close()


def test_a_limit_shortens_the_epoch():
    dataset = Made(lambda index: TENSORS[index], 23)
    loader = make_train(dataset, limit=2, shuffle=False, options=RESIDENT)
    assert [epoch_of([loader], epoch, dataset=dataset) for epoch in (0, 1)] == [[[0, 1, 2, 3], [4, 5, 6, 7]]] * 2
    shuffled = make_train(dataset, limit=2, options=RESIDENT)
    assert shuffled.steps.constant == len(epoch_of([shuffled], 0, dataset=dataset)) == 2


@pytest.mark.parametrize("way", ["tensors", "one by one"])
def test_another_plan_takes_the_same_samples(way):
    """The samples are those of a loader made for the other plan, also after an epoch that was left early."""
    dataset, loading = WAYS[way]
    loader = make_train(dataset, batch_size=2, options=loading)
    left: Any = loader.epoch(0)
    next(next(left).micro_batches)
    left.close()
    plan = plan_batches(batch_size=30, global_batch_size=None, world_size=1, accumulate=2)
    wanted = [batch.tolist() for batch in GlobalOrder(SIZE, seed=5, shuffle=True).indices(1)[:].split(60)]
    assert epoch_of([loader.replanned(plan)], 1, dataset=dataset) == wanted
    assert [loader.replanned(plan, limit=limit).steps.constant for limit in (None, 2)] == [4, 2]
    loader.close()


def test_batches_are_writable_and_hold_no_graph():
    loader = make_train(TensorDataset(X.clone().requires_grad_(), LABEL), batch_size=8)
    weight = torch.ones(3, requires_grad=True)
    losses = []
    for window in loader.epoch(0):
        for micro in window.micro_batches:
            assert not micro.batch[0].requires_grad
            losses.append(micro.batch[0].add_(1).mul_(weight).sum())
    torch.stack(losses).sum().backward()
    torch.testing.assert_close(weight.grad, X.sum(0) + SIZE)
    assert epoch_of([make_train(TENSORS)], 0, dataset=TENSORS)


# Errors


def broken(index: int) -> Tensor:
    if index == 13:
        raise ValueError("bad image")
    return torch.zeros(1 if index < 13 else index)


@pytest.mark.parametrize("loading", [IN_PROCESS, WORKERS], ids=["in process", "worker"])
def test_a_sample_that_fails_is_named(loading):
    before = torch.get_rng_state()
    for dataset, words in (
        (Subset(Made(broken, SIZE), range(14)), r"\ASample 13 of the train dataset raised ValueError: bad image\n  /"),
        (
            Subset(Made(broken, SIZE), range(14, 18)),
            r"\ASamples \[0, 1, 2, 3\] of the train dataset don't make a batch",
        ),
    ):
        loader = make_train(dataset, shuffle=False, options=loading)
        with pytest.raises(RunError, match=words) as caught:
            list(taken(loader.epoch(0)))
        assert ("in broken: raise ValueError" in str(caught.value)) == ("bad image" in words)
        loader.close()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("make", [make_train, make_eval])
def test_an_empty_dataset_is_refused(make):
    with pytest.raises(DataError, match="dataset is empty"):
        make(TensorDataset(torch.zeros(0, 3)))


def test_less_than_a_sample_per_process_is_refused():
    with pytest.raises(DataError, match="3 samples for 4 processes"):
        dataset_size(Subset(TENSORS, range(3)), split="train", processes=4)


# Workers


def of_worker(index: int) -> Tensor:
    """Survive what a scheduler sends to every process, and return which signal the parent's death would send."""
    os.kill(os.getpid(), signal.SIGTERM)
    asked = ctypes.c_int()
    # Ask for PR_GET_PDEATHSIG.
    ctypes.CDLL(None).prctl(2, ctypes.byref(asked))
    return torch.tensor([asked.value, os.getpid()])


def test_workers_end_with_their_process():
    loader = make_train(Made(of_worker, 8), options=LoaderOptions(num_workers=2))
    numbers = [micro.batch for micro in micro_batches(loader, 0)]
    asked, pids = torch.cat(numbers).unbind(1)
    assert set(asked.tolist()) == {signal.SIGKILL}
    assert len(set(pids.tolist())) == 2
    loader.close()
    loader.close()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids.tolist())  # noqa: PTH110
    with pytest.raises(RuntimeError, match="closed"):
        next(next(loader.epoch(1)).micro_batches)


# On the way to a device


class Pair(NamedTuple):
    image: Tensor
    label: Tensor


def test_tensors_at_any_depth_are_moved():
    batch = {"pair": Pair(X, LABEL), "list": [X, (X, "name", 3)], "ordered": OrderedDict(x=X), "nothing": None}
    moved = to_device(batch, META)
    assert isinstance(moved["pair"], Pair)
    tensors = [*moved["pair"], moved["list"][0], moved["list"][1][0], moved["ordered"]["x"]]
    assert [tensor.device for tensor in tensors] == [META] * 5
    assert moved["pair"].image.shape == X.shape
    assert (moved["list"][1][1:], moved["nothing"]) == (("name", 3), None)
    assert to_device(X, CPU) is X


def test_the_next_copy_starts_early():
    seen: list[str] = []

    class Copies:
        """A stand-in for a device's streams."""

        def begin_copy(self, batch: str) -> tuple[str, None]:
            seen.append(f"begin {batch}")
            return batch, None

        def wait_for(self, batch: str, _: None) -> str:
            return batch

    copies: Any = Copies()
    for batch in prefetch(["a", "b", "c"], CPU, side_stream=copies):
        seen.append(f"use {batch}")
    assert seen == ["begin a", "begin b", "use a", "begin c", "use b", "use c"]
