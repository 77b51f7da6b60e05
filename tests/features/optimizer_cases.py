"""A model with two heads over one body, and a task that trains each with an objective of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD
from torch.utils.data import TensorDataset

from framework import Batch, Datasets, Objective, StepOutput

SIZE = 44
BATCH = 12
"""The last global batch of an epoch has 8 samples."""


def points() -> Datasets:
    x = torch.randn(SIZE, 6, generator=torch.Generator().manual_seed(0))
    samples = TensorDataset(x, x[:, :2].tanh())
    return Datasets(train=samples, val=samples)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh())
        self.copy = nn.Linear(8, 6)
        self.guess = nn.Linear(8, 2)

    def forward(self, x: Tensor, head: str = "guess") -> Tensor:
        output: Tensor = getattr(self, head)(self.body(x))
        return output


def by_layer(params: Any, model: nn.Module, lr: float, decay: float) -> SGD:
    """Return an optimizer with groups of its own: the nearer to the input, the lower the rate."""
    layers = [module for module in model.modules() if list(module.parameters(recurse=False))]
    groups = []
    for number, layer in enumerate(reversed(layers)):
        groups.append({"params": list(layer.parameters(recurse=False)), "lr": lr * decay**number, "name": str(number)})
    return SGD(groups, lr=lr, momentum=0.9)


class Guess(nn.Module):
    """One head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.guess = nn.Linear(8, 2)

    def stages(self, number: int) -> list[nn.Module]:
        return [nn.Sequential(self.body, nn.Tanh()), self.guess]

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.guess(self.body(x).tanh())
        return output


class Single:
    """Both losses as one."""

    def training_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        x, y = batch
        return StepOutput(mse_loss(model(x), y), len(x))

    validation_step = training_step


class Alternating:
    """The body learns to copy in every step, and the guess is trained in every `every`-th one."""

    def __init__(self, every: int = 3, offset: int = 0, optimizer: str = "guess") -> None:
        self.objectives = [
            Objective("copy", self.copy, "copy"),
            Objective("guess", self.guess, optimizer, every=every, offset=offset),
        ]

    def copy(self, model: nn.Module, batch: Batch) -> StepOutput:
        x, _ = batch
        return StepOutput(mse_loss(model(x, "copy"), x), len(x))

    def guess(self, model: nn.Module, batch: Batch) -> StepOutput:
        x, y = batch
        return StepOutput(mse_loss(model(x, "guess"), y), len(x), {"first": (y[:, 0].sum(), len(y))})

    validation_step = guess


class Wrong(Alternating):
    """Has no objective in most steps."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.objectives = [Objective("copy", self.copy, "copy", every=2)]


class Earlier(Alternating):
    """Names its objectives as earlier versions did."""

    def __init__(self) -> None:
        super().__init__()
        self.phases = self.objectives
        del self.objectives
