"""Scores of a classifier on sets of uneven size, and metrics that are no sums."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from framework import Batch, Datasets, StepOutput

CLASSES = 4


def points(size: int = 37, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 6, generator=generator)
    classes = (x[:, :CLASSES] + 0.7 * torch.randn(size, CLASSES, generator=generator)).argmax(dim=1)
    return TensorDataset(x, classes)


def sets(several: bool = False) -> Datasets:
    if several:
        val = {"clean": points(23, seed=1), "noisy": points(2, seed=2)}
        return Datasets(points(), val=val, test={"last": points(5, seed=3)})
    return Datasets(points(), val=points(23, seed=1), test=points(2, seed=2))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.head = nn.Linear(8, CLASSES)

    def stages(self, number: int) -> list[nn.Module]:
        return [nn.Sequential(self.body, nn.Tanh()), self.head]

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.body(x).tanh())
        return scores


class Median:
    """A metric of a user's own: the median and the largest of all losses."""

    def reset(self) -> None:
        self.values: list[Tensor] = []

    def update(self, values: Tensor) -> None:
        self.values.append(values)

    def state(self) -> list[Tensor]:
        return self.values

    def merge(self, state: list[Tensor]) -> None:
        self.values += state

    def compute(self) -> dict[str, Any]:
        values = torch.cat(self.values)
        return {"median": values.median(), "largest": float(values.max())}


class Many(Median):
    def compute(self) -> Any:
        return torch.cat(self.values)


class WithMedian:
    """A task of a user's own."""

    def __init__(self, wrong: str | None = None) -> None:
        self.metrics: dict[str, Any] = {"losses": Many() if wrong == "many" else Median()}
        self.wrong = wrong

    def training_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        x, y = batch
        return StepOutput(nn.functional.cross_entropy(model(x), y), len(x))

    def validation_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        x, y = batch
        losses = nn.functional.cross_entropy(model(x), y, reduction="none")
        updates: Any = {"loses" if self.wrong == "name" else "losses": (losses,)}
        if self.wrong == "list":
            updates = [1]
        return StepOutput(losses.mean(), len(x), updates=updates)
