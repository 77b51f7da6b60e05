"""Sequences of different lengths, whose padding doesn't count, and samples with weights of their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from framework import Batch, Datasets, StepOutput

SIZE = 44
BATCH = 12
LENGTH = 6
CLASSES = 3
PADDING = -1


def sequences() -> Datasets:
    """A quarter of the samples is padding only, and they are neighbours in the data set."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(SIZE, LENGTH, 4, generator=generator)
    lengths = torch.randint(1, LENGTH + 1, (SIZE,), generator=generator)
    lengths[:11] = 0
    classes = torch.randint(CLASSES, (SIZE, LENGTH), generator=generator)
    classes[torch.arange(LENGTH) >= lengths[:, None]] = PADDING
    samples = TensorDataset(tokens, classes)
    return Datasets(train=samples, val=samples)


class Tagger(nn.Module):
    """Scores of shape (samples, classes, places)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.head = nn.Linear(8, CLASSES)

    def stages(self, number: int) -> list[nn.Module]:
        return [nn.Sequential(self.body, nn.Tanh()), nn.Sequential(self.head, Turned())]

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.body(x).tanh()).transpose(1, 2)
        return output


class Turned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class SampleWeights:
    """Each sample's weight is its place; those of class 0 at the first place have no weight."""

    def __init__(self, has_weights: bool = True) -> None:
        self.has_weights = has_weights

    def training_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        x, y = batch
        weights = torch.where(y[:, 0] == PADDING, 0.0, 1.0 + y[:, 1].abs())
        losses = cross_entropy(model(x)[:, :, 0], y[:, 0], reduction="none", ignore_index=PADDING)
        loss = (losses * weights).sum() / weights.sum()
        return StepOutput(loss, len(x), weight=weights.sum() if self.has_weights else None)

    validation_step = training_step


class Sometimes(SampleWeights):
    def training_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        self.has_weights = not self.has_weights
        return super().training_step(model, batch)


class Wrong(SampleWeights):
    def training_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        return super().training_step(model, batch)._replace(weight=torch.ones(2))
