"""Trainings that are hard to repeat: they draw numbers, keep statistics, fail, or have samples of several kinds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, IterableDataset

from framework import Datasets, StepOutput

SIZE = 60
BAD_SAMPLE = 41
"""Only in `Points(bad=True)`: it makes the loss NaN."""


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Random points, noisy at each access, with names."""

    def __init__(self, bad: bool = False) -> None:
        self.x = torch.randn(SIZE, 8, generator=torch.Generator().manual_seed(0))
        if bad:
            self.x[BAD_SAMPLE] = torch.inf
        # Of something else than the samples.
        self.names = [f"class {number}" for number in range(2 * SIZE)]
        self.files = [f"point_{number}.png" for number in range(SIZE)]

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self.x[index]
        return x + 0.1 * torch.randn(8), x[:4].argmax()


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    # Not of single samples.
    files = tuple(f"shard_{number}.tar" for number in range(SIZE))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        points = Points()
        for index in range(SIZE):
            yield points.x[index], points.x[index, :4].argmax()


def points(bad: bool = False) -> Datasets:
    return Datasets(train=Points(bad), val=Points())


def stream() -> Datasets:
    return Datasets(train=Stream(), val=Points())


class Noisy(nn.Module):
    """Draws numbers and keeps statistics, and has a ReLU that works in place."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.relu = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(0.3)
        self.two = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.two(self.dropout(self.relu(self.norm(self.one(x)))))
        return output


class Classify:
    """Also counts its steps, which checkpoints keep."""

    def __init__(self) -> None:
        self.steps = 0

    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        self.steps += 1
        return self.validation_step(model, batch)

    def validation_step(self, model: nn.Module, batch: Any) -> StepOutput:
        x, y = batch
        logits = model(x)
        return StepOutput(cross_entropy(logits, y), len(x), {"accuracy": ((logits.argmax(dim=1) == y).sum(), len(x))})

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
