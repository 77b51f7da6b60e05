"""A two-layer network on synthetic regression data: the smallest recipe that learns something."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from framework import Datasets

INPUTS, OUTPUTS = 10, 5
INPUT_SCALE = 4.0  # with a learning rate of 0.001 the loss falls soon, and with 0.1 it stays finite


class ToyModel(nn.Module):
    """Linear 10→10, ReLU, linear 10→5."""

    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(INPUTS, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.net2(self.relu(self.net1(x)))
        return output


def toy_regression(
    num_samples: int = 2000,
    noise: float = 0.1,
    seed: int = 0,
    val_fraction: float = 0.1,
    test_fraction: float = 0.1,
) -> Datasets:
    """Return inputs (N, 10) = INPUT_SCALE · x and targets (N, 5) = A x + relu(B x) + noise, for random A and B.

    Args:
        num_samples: Number of samples of all parts together.
        noise: Standard deviation of the noise.
        seed: Seed of the data. It is independent of the run's seed.
        val_fraction: Share of the samples for validation.
        test_fraction: Share of the samples for testing.
    """
    generator = torch.Generator().manual_seed(seed)
    linear, bent = (torch.randn(INPUTS, OUTPUTS, generator=generator) / INPUTS**0.5 for _ in range(2))
    inputs = torch.randn(num_samples, INPUTS, generator=generator)
    targets = inputs @ linear + torch.relu(inputs @ bent)
    targets += noise * torch.randn(num_samples, OUTPUTS, generator=generator)
    inputs *= INPUT_SCALE

    num_val, num_test = int(num_samples * val_fraction), int(num_samples * test_fraction)
    sizes = [num_samples - num_val - num_test, num_val, num_test]
    train, val, test = (
        TensorDataset(x, y) for x, y in zip(torch.split(inputs, sizes), torch.split(targets, sizes), strict=True)
    )
    return Datasets(train=train, val=val if num_val else None, test=test if num_test else None)
