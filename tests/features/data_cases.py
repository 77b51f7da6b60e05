"""Data as people have it: samples of different lengths, classes of different sizes, DataLoaders, several sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_sequence
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from framework import Batch, Callback, Datasets, StepInfo, StepOutput, Stop, samplers

SIZE = 40


class Sequences(Dataset[tuple[Tensor, int]]):
    """Sample i is a sequence of 1 + 7 i mod 11 numbers, and i. Three in four are of class 0."""

    def __init__(self, size: int = SIZE, begin: int = 0) -> None:
        self.lengths = [1 + 7 * i % 11 for i in range(size)]
        self.targets = [int(i % 4 == 0) for i in range(size)]
        self.weights = [float(i % 2) for i in range(size)]
        self.begin = begin

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((self.lengths[index],), 1.0 + index), self.begin + index


def pad(samples: list[tuple[Tensor, int]], value: float = 0.0) -> dict[str, Tensor]:
    """A collate function."""
    sequences, numbers = zip(*samples, strict=True)
    return {"x": pad_sequence(list(sequences), batch_first=True, padding_value=value), "number": torch.tensor(numbers)}


@dataclass(frozen=True, slots=True)
class Packed:
    """A batch of sequences without padding."""

    x: PackedSequence
    number: Tensor


def pack(samples: list[tuple[Tensor, int]]) -> Packed:
    sequences, numbers = zip(*samples, strict=True)
    return Packed(pack_sequence(list(sequences), enforce_sorted=False), torch.tensor(numbers))


def fails(samples: list[Any]) -> Batch:
    raise ValueError(f"{len(samples)} samples")


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


class Notes:
    """A task that writes down which samples each of its steps gets, and how long the padded sequences are."""

    def __init__(self, folder: str, rank: int | None = None) -> None:
        self.folder = Path(folder)
        self.step = 0

    def training_step(self, model: nn.Module, batch: Mapping[str, Tensor]) -> StepOutput:
        import os

        with (self.folder / f"rank_{os.environ['RANK']}").open("a") as file:
            print(batch["number"].tolist(), batch["x"].shape[1], file=file)
        return self.validation_step(model, batch)

    def validation_step(self, model: nn.Module, batch: Mapping[str, Tensor]) -> StepOutput:
        number = len(batch["number"])
        loss = model(batch["x"]).sum() / number / 1000
        return StepOutput(loss, number, {"number": (batch["number"].sum(), number)})


class OfPacked:
    """A task whose model gets packed numbers, which must have its own type."""

    def training_step(self, model: nn.Module, batch: Packed) -> StepOutput:
        assert batch.x.data.dtype == next(model.parameters()).dtype
        number = len(batch.number)
        return StepOutput(model(batch.x.data).sum() / number / 1000, number)

    validation_step = training_step


def sequences() -> Datasets:
    return Datasets(Sequences(), val={"all": Sequences(), "few": Sequences(3, begin=100)}, test={"one": Sequences(1)})


def with_collate() -> Datasets:
    return Datasets(Sequences(), collate_fn=pad, sampler=samplers.SequentialSampler(Sequences()))


def mixed() -> Datasets:
    sets: Any = [Sequences(10), Sequences(30, begin=100)]
    return Datasets(ConcatDataset(sets), collate_fn=pad)


def loader(kind: str) -> Datasets:
    """A DataLoader as the train part."""
    data: Any = Sequences()
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "shuffled": {"shuffle": True},
        "weighted": {"sampler": WeightedRandomSampler(data.weights, 20)},
        "subset": {"sampler": SubsetRandomSampler(range(5, 15))},
        "drawn": {"sampler": RandomSampler(data, replacement=True, num_samples=8)},
        "distributed": {"sampler": DistributedSampler(data, num_replicas=2, rank=0)},
        "initialised": {"worker_init_fn": print},
        "dropping": {"drop_last": True, "shuffle": True},
        "batches": {"batch_sampler": Batches(RandomSampler(data), 4, drop_last=False)},
    }
    if kind == "stateful":
        stateful: Any = import_module("torchdata.stateful_dataloader")
        return Datasets(stateful.StatefulDataLoader(data, batch_size=4, shuffle=True, collate_fn=pad))
    chosen = options.get(kind, {})
    sizes: dict[str, Any] = {} if "batch_sampler" in chosen else {"batch_size": 4}
    if kind == "dropping":
        data = Subset(data, range(27))
    val = DataLoader(Subset(data, range(9)), batch_size=3, collate_fn=pad)
    if kind == "dropping a stream":
        val = DataLoader(Streamed(), batch_size=3, drop_last=True)
    if kind == "dropping all":
        val = DataLoader(Subset(data, range(9)), batch_size=10, drop_last=True)
    return Datasets(DataLoader(data, collate_fn=pad, **sizes, **chosen), val)


class Streamed(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


class Batches(BatchSampler):
    pass


class OwnSampler:
    """A sampler whose order is valid or wrong, depending on `kind`."""

    def __init__(self, dataset: Any, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 8

    def order(self, generator: torch.Generator, *, batch_size: int) -> Any:
        orders: dict[str, Callable[[], Any]] = {
            "list": lambda: list(range(8)),
            "short": lambda: torch.arange(7),
            "outside": lambda: torch.arange(8) + SIZE,
            "floats": lambda: torch.arange(8.0),
        }
        return orders[self.kind]()


def huggingface(streams: bool = False) -> Datasets:
    """A data set of Hugging Face, as it is."""
    datasets: Any = import_module("datasets")
    whole = datasets.Dataset.from_dict({"x": [[1.0 + i] * 3 for i in range(SIZE)], "number": list(range(SIZE))})
    if streams:
        return Datasets(whole.to_iterable_dataset(num_shards=2).with_format("torch"))
    return Datasets(whole.with_format("torch"), whole.with_format("torch").select(range(9)))


class Growing:
    """A curriculum: the first 7 samples in epoch 0, and 13 more in every epoch.

    Args:
        computes: The order is an object that computes the slices that are read, not a tensor.
        wrong: A mistake, which must be refused.
    """

    def __init__(self, dataset: Any, computes: bool = False, wrong: str = "") -> None:
        self.computes = computes
        self.wrong = wrong
        self.calls = 0

    def length(self, epoch: int) -> Any:
        self.calls += 1
        lengths = {"nothing": 0, "changing": self.calls, "float": 7.0}
        return lengths.get(self.wrong, min(SIZE, 7 + 13 * epoch))

    def order(self, generator: torch.Generator, *, batch_size: int, epoch: int) -> Any:
        order = torch.randperm(self.length(epoch), generator=generator)
        if self.wrong == "slices":
            order = order.int()
        if self.wrong == "fewer":
            order = order[1:]
        return Computed(order) if self.computes else order


class Computed:
    def __init__(self, order: Tensor) -> None:
        self._order = order

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, positions: slice) -> Tensor:
        return self._order[positions]


class StopAt(Callback):
    def on_train_step_end(self, info: StepInfo) -> Stop | None:
        return Stop("enough") if info.step == 3 else None
