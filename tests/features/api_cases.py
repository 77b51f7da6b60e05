"""A model, data and functions that tests hand to `framework.train`; other processes can import them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from framework import Datasets


class Net(nn.Sequential):
    def __init__(self, hidden: int = 8, activation: type[nn.Module] = nn.ReLU) -> None:
        super().__init__(nn.Linear(4, hidden), activation(), nn.Linear(hidden, 3))


def samples(number: int, *, seed: int = 0) -> TensorDataset:
    inputs = torch.randn(number, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, (inputs[:, :2] > 0).sum(dim=1))


def loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    return (
        DataLoader(samples(120), batch_size=10, shuffle=True),
        DataLoader(samples(60, seed=1), batch_size=30),
    )


def datasets(size: int) -> Datasets:
    return Datasets(samples(size), samples(60, seed=1), samples(60, seed=2), batch_size=10)


def smoothed(output: Tensor, target: Tensor, smoothing: float = 0.1) -> Tensor:
    return nn.functional.cross_entropy(output, target, label_smoothing=smoothing)
