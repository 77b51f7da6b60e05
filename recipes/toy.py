"""A two-layer network on synthetic regression data: the smallest recipe that learns something."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from framework import Datasets

INPUTS = 10
OUTPUTS = 5

INPUT_SCALE = 4.0
"""With it the loss falls soon at a learning rate of 0.001, and stays finite at 0.1."""


class ToyModel(nn.Module):
    """Linear 10→10, ReLU, linear 10→5."""

    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(INPUTS, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.net2(self.relu(self.net1(x)))


def toy_regression(
    num_samples: int = 2000,
    noise: float = 0.1,
    seed: int = 0,
    val_fraction: float = 0.1,
    test_fraction: float = 0.1,
) -> Datasets:
    """Return inputs x (N, 10) and targets A x + relu(B x) + noise (N, 5), for random matrices A and B.

    The inputs are multiplied by INPUT_SCALE after the targets were computed.

    Args:
        num_samples: Number of samples of all parts together.
        noise: Standard deviation of the noise.
        seed: Seed of the data. It is independent of the run's seed.
        val_fraction: Share of the samples for validation.
        test_fraction: Share of the samples for testing.
    """
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(INPUTS, OUTPUTS, generator=generator) / INPUTS**0.5
    B = torch.randn(INPUTS, OUTPUTS, generator=generator) / INPUTS**0.5
    x = torch.randn(num_samples, INPUTS, generator=generator)
    y = x @ A + torch.relu(x @ B)
    y = y + noise * torch.randn(num_samples, OUTPUTS, generator=generator)
    x = x * INPUT_SCALE

    num_val = int(num_samples * val_fraction)
    num_test = int(num_samples * test_fraction)
    num_train = num_samples - num_val - num_test
    sizes = [num_train, num_val, num_test]
    train_x, val_x, test_x = x.split(sizes)
    train_y, val_y, test_y = y.split(sizes)
    return Datasets(
        train=TensorDataset(train_x, train_y),
        val=TensorDataset(val_x, val_y) if num_val else None,
        test=TensorDataset(test_x, test_y) if num_test else None,
    )
