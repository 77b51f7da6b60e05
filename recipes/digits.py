"""A small convolutional network on handwritten digits: real data, no download.

The data are the 1,797 digits of 8×8 pixels that come with scikit-learn (the test part of
https://archive.ics.uci.edu/dataset/80), resized to the 28×28 pixels of MNIST. The network is that of
https://github.com/pytorch/examples/tree/main/mnist. Images have the shape (B, 1, 28, 28).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from torch.utils.data import TensorDataset

from framework import ConfigError, Datasets

IMAGE_SIZE = 28
LARGEST_PIXEL = 16
STAGE_BEGINS = {2: [0, 7], 3: [0, 2, 7], 4: [0, 2, 7, 10]}
"""Number of stages → index of the first layer of each."""


class ConvNet(nn.Module):
    """Two convolutions with 32 channels, max-pooling and two linear layers, for images of 1×28×28 pixels.

    Args:
        conv_dropout: Dropout probability after the pooling.
        dropout: Dropout probability after the first linear layer.
        num_classes: Number of scores per image.
    """

    def __init__(self, conv_dropout: float = 0.25, dropout: float = 0.5, num_classes: int = 10) -> None:
        super().__init__()
        # Each convolution takes two pixels off each side, and the pooling halves it.
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

    def forward(self, images: Tensor) -> Tensor:
        x = self.features(images)  # (B, 32 * pooled_size**2)
        return self.classifier(x)  # (B, num_classes)

    def stages(self, number: int) -> list[nn.Module]:
        """Return the layers in `number` groups, for strategy=pipeline."""
        if number not in STAGE_BEGINS:
            raise ConfigError(
                f"ConvNet can be cut into 2, 3 or 4 stages, not {number}.\n"
                "Set strategy.num_stages to one of these, and use a multiple of as many processes."
            )
        layers = [*self.features, *self.classifier]
        begins = STAGE_BEGINS[number]
        ends = [*begins[1:], len(layers)]
        return [nn.Sequential(*layers[begin:end]) for begin, end in zip(begins, ends, strict=True)]


def digits(size: int = IMAGE_SIZE, val_size: int = 180, test_size: int = 360, seed: int = 0) -> Datasets:
    """Return the digits as images of shape (1, size, size) with labels 0–9, normalised over the training part.

    Args:
        size: Pixels per side.
        val_size: Number of validation samples.
        test_size: Number of test samples; the rest is for training.
        seed: Seed of the random split.
    """
    # Importing it takes a second, which only this recipe should pay.
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.from_numpy(bunch.images).float() / LARGEST_PIXEL
    # (N, 8, 8) → (N, 1, size, size)
    images = interpolate(images.unsqueeze(1), size=(size, size), mode="bilinear", align_corners=False)
    labels = torch.from_numpy(bunch.target).long()  # (N)

    num_train = len(labels) - val_size - test_size
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=generator)
    train, val, test = order.split([num_train, val_size, test_size])

    # NumPy, because the order of torch's sums depends on the number of threads, and the data must not.
    train_pixels = images[train].double().numpy()
    images = (images - train_pixels.mean()) / train_pixels.std()
    return Datasets(
        train=TensorDataset(images[train], labels[train]),
        val=TensorDataset(images[val], labels[val]),
        test=TensorDataset(images[test], labels[test]),
    )
