"""`set_epoch` of datasets, transforms, collate functions and samplers: in every process, before an epoch begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset, random_split

from framework import TensorSamples
from framework.errors import DataError, RunError
from tests.helpers.internals import LoaderOptions, MapLoader, plan_batches
from tests.helpers.loaders import eval_loader, micro_batches
from tests.unit.streams import make_loader

CPU = torch.device("cpu")
SIZE = 8
# torch's DataLoader sets a handler for SIGCHLD when it first starts workers.
pytestmark = pytest.mark.usefixtures("own_state")
WAYS = [LoaderOptions(num_workers=0), LoaderOptions(num_workers=1), LoaderOptions(num_workers=2)]
NAMES = ["in process", "one worker", "two workers"]


class Noting:
    """Record the epochs passed to set_epoch."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    @property
    def epoch(self) -> int:
        return self.epochs[-1]


class Samples(Noting, Dataset[Tensor]):
    """Samples of the number of calls and the epoch: of the dataset, and of its transform."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__()
        self.size = size
        self.transforms = [Noting()]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        (transform,) = self.transforms
        return torch.tensor([len(self.epochs), self.epoch, len(transform.epochs), transform.epoch])


class Stack(Noting):
    """A collate function."""

    def __call__(self, samples: Sequence[Tensor]) -> Tensor:
        return torch.cat([torch.stack(list(samples)), torch.tensor([[len(self.epochs), self.epoch]] * len(samples))], 1)


class Order(Noting):
    """A sampler that holds the dataset."""

    def __init__(self, dataset: Any) -> None:
        super().__init__()
        self.dataset = dataset

    def __len__(self) -> int:
        return SIZE

    def order(self, generator: torch.Generator, *, batch_size: int) -> Tensor:
        assert self.dataset.epoch == self.epoch
        return torch.arange(SIZE)


def loader(dataset: Any, options: LoaderOptions, **how: Any) -> MapLoader:
    plan = plan_batches(batch_size=2, global_batch_size=None, world_size=1, accumulate=1)
    return MapLoader(dataset, split="train", plan=plan, rank=0, device=CPU, options=options, seed=5, **how)


def batches(loading: MapLoader, epoch: int, start: int = 0) -> list[Any]:
    return [micro.batch for micro in micro_batches(loading, epoch, start)]


def rows(loading: MapLoader, epoch: int, start: int = 0) -> set[tuple[float, ...]]:
    return set(map(tuple, torch.cat(batches(loading, epoch, start)).tolist()))


@pytest.mark.parametrize("options", WAYS, ids=NAMES)
def test_set_epoch_precedes_the_first_batch_once(options: LoaderOptions) -> None:
    dataset = Samples()
    collate = Stack()
    whole: Any = ConcatDataset([Subset(dataset, range(4)), Subset(dataset, range(4, SIZE))])
    own = LoaderOptions(options.kind, options.num_workers, collate_fn=collate)
    order = Order(dataset)
    loading = loader(whole, own, sampler=order)
    try:
        assert rows(loading, 0) == {(1, 0, 1, 0, 1, 0)}
        assert rows(loading, 1) == {(2, 1, 2, 1, 2, 1)}
        # As a run that is resumed within an epoch does, whose objects are new.
        assert rows(loading, 5, start=4) == {(3, 5, 3, 5, 3, 5)}
        left: Any = loading.epoch(6)
        next(next(left).micro_batches)
        left.close()
        assert rows(loading, 6) == {(4, 6, 4, 6, 4, 6)}
        # Those of this process, too.
        assert dataset.epochs == collate.epochs == order.epochs == [0, 1, 5, 6]
    finally:
        loading.close()


def scaled(size: int = SIZE) -> Any:
    class Scale(Noting):
        def __call__(self, batch: list[Tensor], _: Any) -> list[Tensor]:
            return [batch[0] + self.epoch]

    return TensorSamples(torch.zeros(size, 1), transform=Scale())


@pytest.mark.parametrize("options", [LoaderOptions(), LoaderOptions(num_workers=1)], ids=["resident", "worker"])
def test_a_transform_of_batches_gets_the_epoch(options: LoaderOptions) -> None:
    loading = loader(Subset(scaled(), range(6)), options)
    try:
        for epoch in (0, 1, 7):
            assert {tensor.unique().item() for (tensor,) in batches(loading, epoch)} == {float(epoch)}
    finally:
        loading.close()


class Drawing(Dataset[Tensor]):
    """Draws what the whole epoch depends on in `set_epoch`, in some way."""

    def __init__(self, draw: Callable[[Drawing, int], float]) -> None:
        self.draw = draw
        self.generator = np.random.default_rng(0)

    def set_epoch(self, epoch: int) -> None:
        self.drawn = self.draw(self, epoch)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([self.drawn, self.generator.random()])


def of_numpy(_: Drawing, epoch: int) -> float:
    return epoch + np.random.rand()


def of_its_own(dataset: Drawing, epoch: int) -> float:
    return epoch + dataset.generator.random()


def new_generator(dataset: Drawing, epoch: int) -> float:
    dataset.generator = np.random.default_rng(epoch)
    return float(epoch)


DRAWS: dict[str, Callable[[Drawing, int], float]] = {
    "NumPy's": of_numpy,
    "its own": of_its_own,
    "a new one": new_generator,
}


@pytest.mark.parametrize("kind", DRAWS)
def test_epoch_draws_are_equal_in_every_process(kind: str) -> None:
    def drawn(options: LoaderOptions, epoch: int) -> list[Any]:
        loading = loader(Drawing(DRAWS[kind]), options)
        try:
            return torch.cat(batches(loading, epoch)).tolist()
        finally:
            loading.close()

    wanted = drawn(WAYS[0], 3)
    assert len({sample for _, sample in wanted}) == SIZE
    assert drawn(WAYS[2], 3) == wanted
    assert drawn(WAYS[0], 4) != wanted


def test_a_wrapper_may_pass_on_another_epoch() -> None:
    class Halves(Noting, Dataset[Tensor]):
        inner = Samples()

        def set_epoch(self, epoch: int) -> None:
            self.inner.set_epoch(epoch // 2)

        def __len__(self) -> int:
            return SIZE

        def __getitem__(self, index: int) -> Tensor:
            return self.inner[index]

    assert {row[1] for row in rows(loader(Halves(), WAYS[0]), 6)} == {3}


@pytest.mark.parametrize("options", WAYS[:2], ids=NAMES[:2])
def test_evaluation_sets_the_epoch_of_the_weights(options: LoaderOptions) -> None:
    """An evaluation's dataset is often part of the one that is trained on."""
    train, val = random_split(Samples(), [6, 2])
    evaluation = eval_loader(val, batch_size=2, options=options)
    training = loader(train, options)
    try:
        for epoch in (0, 1, 4):
            assert {row[1] for row in rows(training, epoch)} == {epoch}
            evaluation.set_epoch(epoch)
            for micro in evaluation:
                assert {int(row[1]) for row in micro.batch} == {epoch}
    finally:
        training.close()
        evaluation.close()


class Stream(Noting, IterableDataset[Any]):
    def __init__(self) -> None:
        super().__init__()
        self.transform = Noting()

    def __iter__(self) -> Any:
        for _ in range(4):
            yield torch.tensor([self.epoch, self.transform.epoch])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_parts_of_a_stream_get_the_epoch(num_workers: int) -> None:
    loading = make_loader(Stream(), collate_fn=Stack(), num_workers=num_workers)
    try:
        for epoch in (0, 1, 5):
            samples = torch.cat([micro.batch for micro in micro_batches(loading, epoch)])
            assert {(row[0], row[1], row[3]) for row in samples.tolist()} == {(epoch, epoch, epoch)}
    finally:
        loading.close()


# Errors


class Broken(Samples):
    def set_epoch(self, epoch: int) -> None:
        raise ValueError(f"no stage {epoch}")


@pytest.mark.parametrize("in_stream", [False, True])
def test_a_set_epoch_that_fails_is_named(in_stream: bool) -> None:
    class BrokenStream(Stream):
        set_epoch = Broken.set_epoch

    loading = make_loader(BrokenStream()) if in_stream else loader(Broken(), WAYS[0])
    said = r"(?s)set_epoch\(2\) for the train dataset raised ValueError: no stage 2\n.*in set_epoch: raise ValueError"
    with pytest.raises(RunError, match=said):
        next(iter(loading.epoch(2)))
    loading.close()


def test_samples_that_may_change_cannot_be_resident() -> None:
    with pytest.raises(DataError, match=r"can't be resident: it has set_epoch"):
        loader(Samples(), LoaderOptions("resident"))
    loader(TensorDataset(torch.zeros(4, 1)), LoaderOptions("resident"))
