"""Data to split into folds: a sample is its number and its class. A task writes down which samples it sees."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, WeightedRandomSampler

from framework import Datasets, StepOutput, TensorSamples

SIZE = 43
CLASSES = [0] * 25 + [1] * 11 + [2] * 7
"""Of the samples by their numbers."""

OWN_VAL = 1000
"""Where the numbers of the recipe's own validation part begin."""

AUGMENTED = 500
"""What augmentation adds to a number, besides a random fraction."""

NUMBERS = torch.arange(SIZE, dtype=torch.float32).unsqueeze(1)
LABELS = torch.tensor(CLASSES)


class Numbered(Dataset[tuple[Tensor, int]]):
    """A map-style dataset with or without `targets`."""

    def __init__(self, *, begin: int = 0, size: int = SIZE, adds: float = 0.0, has_targets: bool = True) -> None:
        self.begin = begin
        self.size = size
        self.adds = adds
        if has_targets:
            self.targets = CLASSES[:size]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor([self.begin + index + self.adds]), CLASSES[index]


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(NUMBERS)


def augmented(batch: list[Tensor], draws: Any) -> list[Tensor]:
    numbers, labels = batch
    return [numbers + AUGMENTED + 0.9 * draws.uniform(1), labels]


def plain(batch: list[Tensor], draws: Any) -> list[Tensor]:
    return batch


def tensors() -> Datasets:
    own_val = TensorDataset(NUMBERS[:9] + OWN_VAL, LABELS[:9])
    return Datasets(TensorDataset(NUMBERS, LABELS), own_val, TensorDataset(NUMBERS, LABELS))


def map_style(has_targets: bool = True) -> Datasets:
    return Datasets(Numbered(has_targets=has_targets), val={"own": Numbered(begin=OWN_VAL, size=9)})


def without_targets() -> Datasets:
    return map_style(has_targets=False)


def loaders() -> Datasets:
    train = DataLoader(Numbered(), batch_size=4, shuffle=True, collate_fn=reversed_pair)
    return Datasets(train, DataLoader(Numbered(begin=OWN_VAL, size=9), batch_size=3, collate_fn=reversed_pair))


def reversed_pair(samples: list[Any]) -> list[Tensor]:
    """A collate function, whose batches have the samples in reverse."""
    numbers, labels = zip(*reversed(samples), strict=True)
    return [torch.stack(numbers), torch.tensor(labels)]


def rows() -> Datasets:
    """Parts that are rows of the same tensors, one of them augmented, as in recipe=mnist."""
    numbers = torch.cat([NUMBERS, NUMBERS[:9] + OWN_VAL])
    labels = torch.cat([LABELS, LABELS[:9]])
    train = TensorSamples(numbers, labels, rows=torch.arange(SIZE), transform=augmented)
    return Datasets(train, TensorSamples(numbers, labels, rows=torch.arange(SIZE, SIZE + 9), transform=plain))


def other_rows() -> Datasets:
    """Parts with tensors of their own. A transform may depend on them, as in recipe=gpt_char."""
    train = TensorSamples(NUMBERS, LABELS, transform=augmented)
    return Datasets(train, TensorSamples(NUMBERS[:9] + OWN_VAL, LABELS[:9], transform=plain))


def subsets() -> Datasets:
    """Subsets of two copies of one dataset, of which one is augmented."""
    order = list(range(SIZE))[::-1]
    numbered: Any = Numbered(adds=AUGMENTED)
    return Datasets(Subset(numbered, order[9:]), Subset(Numbered(), order[:9]))


def stream() -> Datasets:
    return Datasets(Stream())


def weighted() -> Datasets:
    return Datasets(DataLoader(Numbered(), batch_size=4, sampler=WeightedRandomSampler([1.0] * SIZE, 20)))


DATA: dict[str, Callable[[], Datasets]] = {
    maker.__name__: maker
    for maker in (tensors, map_style, without_targets, loaders, rows, other_rows, subsets, stream, weighted)
}


def data(kind: str) -> Datasets:
    return DATA[kind]()


class Notes:
    """A task that writes down the numbers it gets, for each run, part and rank."""

    def __init__(self, folder: str, run: int | None) -> None:
        self.folder = Path(folder)
        self.run = run

    def training_step(self, model: nn.Module, batch: list[Tensor]) -> StepOutput:
        return self._step(model, batch, part="train")

    def validation_step(self, model: nn.Module, batch: list[Tensor]) -> StepOutput:
        return self._step(model, batch, part="val")

    def _step(self, model: nn.Module, batch: list[Tensor], *, part: str) -> StepOutput:
        numbers, _ = batch
        with (self.folder / f"{self.run}_{part}_{os.environ['RANK']}").open("a") as file:
            print(*[int(number) for number in numbers], file=file)
        loss = ((model(numbers / AUGMENTED) - 1) ** 2).mean()
        return StepOutput(loss, len(numbers), {"number": (numbers.sum(), len(numbers))})
