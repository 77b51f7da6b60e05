"""A generative adversarial network (Goodfellow et al., 2014, https://arxiv.org/abs/1406.2661) on 8×8 digits.

The noise comes with the data, drawn for each sample, so that training doesn't depend on the number of processes.
Shapes in the comments:

    B  samples of a batch
    P  pixels of an image, 64
    N  numbers of noise for an image, 16
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from framework import Datasets, EvalInfo, FitInfo, Image, Log, Objective, StepOutput, TensorSamples

IMAGE_SIZE = 8
NUM_PIXELS = IMAGE_SIZE * IMAGE_SIZE
NUM_NOISE = 16


# Model


class GAN(nn.Module):
    """Generator and discriminator in one module.

    Both are called through `forward`, because a strategy such as DDP works there.
    """

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(NUM_NOISE, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, NUM_PIXELS),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Linear(NUM_PIXELS, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, 1),
        )

    def forward(self, part: str, noise: Tensor, real_images: Tensor | None = None) -> Any:
        """Return generated images (B, P), or scores (B, 1): high for images that look real.

        Args:
            part: `images` for the generated images; `generator` for their scores; `discriminator` for the scores of
                generated images and of real ones.
            noise: (B, N).
            real_images: (B, P), for `discriminator`.
        """
        fake_images = self.generator(noise)
        if part == "images":
            return fake_images
        if part == "generator":
            return self.discriminator(fake_images)
        # The discriminator's loss must not train the generator.
        return self.discriminator(fake_images.detach()), self.discriminator(real_images)


# Task


class Adversarial:
    """Each step trains the discriminator, then the generator, on the same batch."""

    def __init__(self) -> None:
        self.objectives = [
            Objective("discriminator", self.discriminator, optimizer="discriminator"),
            Objective("generator", self.generator, optimizer="generator"),
        ]

    def discriminator(self, model: nn.Module, batch: list[Tensor]) -> StepOutput:
        """Tell real images from generated ones."""
        images, noise = batch
        num_images = len(images)
        fake_scores, real_scores = model("discriminator", noise, images)

        scores = torch.cat([fake_scores, real_scores])
        is_real = torch.cat([torch.zeros_like(fake_scores), torch.ones_like(real_scores)])
        loss = binary_cross_entropy_with_logits(scores, is_real)

        metrics = {
            "fooled": ((fake_scores > 0).sum(), num_images),
            "accepted": ((real_scores > 0).sum(), num_images),
        }
        return StepOutput(loss, num_images, metrics)

    def generator(self, model: nn.Module, batch: list[Tensor]) -> StepOutput:
        """Generate images that the discriminator takes for real ones."""
        _, noise = batch
        scores = model("generator", noise)
        loss = binary_cross_entropy_with_logits(scores, torch.ones_like(scores))
        return StepOutput(loss, len(noise))

    def validation_step(self, model: nn.Module, batch: list[Tensor]) -> StepOutput:
        return self.discriminator(model, batch)


# Callback


class Grid:
    """Log a picture of generated digits after each validation."""

    def __init__(self, rows: int = 8) -> None:
        self.rows = rows

    def on_fit_start(self, info: FitInfo) -> None:
        self.model = info.model

    @torch.no_grad()
    def on_validation_end(self, info: EvalInfo) -> Log:
        from torchvision.utils import make_grid

        # The same noise every time, to see the same digits improve.
        generator = torch.Generator().manual_seed(0)
        noise = 2 * torch.rand(self.rows**2, NUM_NOISE, generator=generator) - 1
        device = next(self.model.parameters()).device

        # Every rank computes the images, because under strategy=fsdp each has a part of the weights.
        images = self.model("images", noise.to(device))
        images = images.view(-1, 1, IMAGE_SIZE, IMAGE_SIZE) / 2 + 0.5
        return Log({"samples": Image(make_grid(images, nrow=self.rows, padding=1))})


# Data


def with_noise(batch: list[Tensor], draws: Any) -> list[Tensor]:
    """Return the images and noise from -1 to 1."""
    images = batch[0]
    noise = 2 * draws.uniform(NUM_NOISE) - 1
    return [images, noise]


def digits() -> Datasets:
    """Return scikit-learn's digits, pixels from -1 to 1, each with noise that is redrawn in every epoch."""
    from sklearn.datasets import load_digits

    images = torch.from_numpy(load_digits().data).float() / 8 - 1  # (1797, P)
    return Datasets(
        train=TensorSamples(images[:1600], transform=with_noise),
        val=TensorSamples(images[1600:], transform=with_noise),
    )
