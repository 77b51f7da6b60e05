"""Fine-tuning: odd or even? For a network that knows MNIST's digits, on the smaller digits of scikit-learn."""

from __future__ import annotations

from torch.utils.data import TensorDataset

from framework import Datasets
from recipes.digits import digits


def odd_or_even(size: int = 28) -> Datasets:
    """Return the digits as images of shape (1, size, size), with label 1 for odd ones."""
    return Datasets(*(TensorDataset(part.tensors[0], part.tensors[1] % 2) for part in digits(size)))
