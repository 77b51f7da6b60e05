"""Handwritten digits with a small convolutional network: real data, no download.

The data are the 1,797 digits of 8×8 pixels that scikit-learn brings along (the test part of
https://archive.ics.uci.edu/dataset/80), resized to the 28×28 of MNIST, for which the network was made
(https://github.com/pytorch/examples/tree/main/mnist). B samples; image_BCHW has one channel.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from torch.utils.data import TensorDataset

from framework import ConfigError, Datasets

IMAGE_SIZE = 28
LARGEST_PIXEL = 16
FIRST_LAYERS = {2: (0, 7), 3: (0, 2, 7), 4: (0, 2, 7, 10)}
"""Of each stage, where ConvNet is cut into so many."""


class ConvNet(nn.Module):
    """Two convolutions of 32 channels, max-pool, two linear layers: scores of `num_classes` for images of 1×28×28.

    conv_dropout, dropout: share of values dropped in training after the pooling and after the first linear layer.
    """

    def __init__(self, conv_dropout: float = 0.25, dropout: float = 0.5, num_classes: int = 10) -> None:
        super().__init__()
        pooled_size = (IMAGE_SIZE - 4) // 2
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, kernel_size=3),
            nn.ReLU(),
            nn.Conv2d(32, 32, kernel_size=3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(conv_dropout),
            nn.Flatten(),
        )
        self.classifier = nn.Sequential(
            nn.Linear(32 * pooled_size**2, 128),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(128, num_classes),
        )

    def stages(self, number: int) -> list[nn.Module]:
        """Runs of layers, each with weights, that strategy=pipeline puts on processes of their own."""
        if number not in FIRST_LAYERS:
            raise ConfigError(
                f"ConvNet can be cut into 2, 3 or 4 stages, and {number} were asked for.\n"
                "Use strategy.num_stages=4 or less, and a multiple of so many processes."
            )
        layers, begins = [*self.features, *self.classifier], FIRST_LAYERS[number]
        ends = (*begins[1:], len(layers))
        return [nn.Sequential(*layers[begin:end]) for begin, end in zip(begins, ends, strict=True)]

    def forward(self, image_BCHW: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.features(image_BCHW))
        return scores


def digits(size: int = IMAGE_SIZE, val_size: int = 180, test_size: int = 360, seed: int = 0) -> Datasets:
    """The digits as images of shape (1, size, size) and labels 0–9, split at random but the same for the same seed.

    val_size, test_size: samples of those parts; the rest trains. Pixels are scaled to mean 0 and standard deviation 1
    over the training part.
    """
    # Costs a second: only who trains on the digits pays it.
    from sklearn.datasets import load_digits

    bunch = load_digits()
    image_BCHW = torch.from_numpy(bunch.images).float().unsqueeze(1) / LARGEST_PIXEL
    image_BCHW = interpolate(image_BCHW, size=(size, size), mode="bilinear", align_corners=False)
    labels = torch.from_numpy(bunch.target).long()

    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    train, val, test = torch.split(order, [len(order) - val_size - test_size, val_size, test_size])
    # With NumPy, in float64: how torch adds depends on the number of threads, and the data must not.
    pixels = image_BCHW[train].double().numpy()
    image_BCHW = (image_BCHW - pixels.mean()) / pixels.std()
    return Datasets(*(TensorDataset(image_BCHW[part], labels[part]) for part in (train, val, test)))
