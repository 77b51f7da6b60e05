"""Fine-tuning: a network that knows MNIST's digits learns to tell odd from even ones of scikit-learn's."""

from __future__ import annotations

from torch.utils.data import TensorDataset

from framework import Datasets
from recipes.digits import digits


def odd_or_even(size: int = 28) -> Datasets:
    """Return the digits as images of shape (1, size, size), with label 1 for odd ones."""
    parts = []
    for part in digits(size):
        images, labels = part.tensors
        parts.append(TensorDataset(images, labels % 2))
    return Datasets(*parts)
