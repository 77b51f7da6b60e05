"""A generative adversarial network (Goodfellow et al., 2014, https://arxiv.org/abs/1406.2661) on 8×8 digits.

The noise comes with the data, drawn for each sample, so that training doesn't depend on the number of processes.
Shapes: B samples, P pixels, N numbers of noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from framework import Datasets, EvalInfo, FitInfo, Image, Log, Phase, StepOutput, TensorSamples

SIZE, NOISE = 8, 16


class GAN(nn.Module):
    """Generator and discriminator in one module: strategies work in its forward."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        pixels = SIZE * SIZE
        self.generator = nn.Sequential(
            *(nn.Linear(NOISE, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()),
            *(nn.Linear(width, pixels), nn.Tanh()),
        )
        self.discriminator = nn.Sequential(
            *(nn.Linear(pixels, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2)),
            nn.Linear(width, 1),
        )

    def forward(self, part: str, noise_BN: Tensor, images_BP: Tensor | None = None) -> Any:
        """Return images, or scores of generated and of real ones: high for those that look real."""
        fake_BP = self.generator(noise_BN)
        if part == "images":
            return fake_BP
        if part == "generator":
            return self.discriminator(fake_BP)
        return self.discriminator(fake_BP.detach()), self.discriminator(images_BP)


class Adversarial:
    """Each step trains the discriminator, then the generator, on the same batch."""

    def __init__(self) -> None:
        self.phases = [
            Phase("discriminator", self.discriminator, optimizer="discriminator"),
            Phase("generator", self.generator, optimizer="generator"),
        ]

    def discriminator(self, model: nn.Module, batch: Sequence[Tensor]) -> StepOutput:
        images, noise = batch
        fake, real = model("discriminator", noise, images)
        losses = binary_cross_entropy_with_logits(torch.cat([fake, real]), torch.cat([fake * 0, real * 0 + 1]))
        number = len(images)
        return StepOutput(
            losses, number, {"fooled": ((fake > 0).sum(), number), "accepted": ((real > 0).sum(), number)}
        )

    def generator(self, model: nn.Module, batch: Sequence[Tensor]) -> StepOutput:
        _, noise = batch
        scores = model("generator", noise)
        return StepOutput(binary_cross_entropy_with_logits(scores, torch.ones_like(scores)), len(noise))

    def validation_step(self, model: nn.Module, batch: Sequence[Tensor]) -> StepOutput:
        return self.discriminator(model, batch)


class Grid:
    """Log generated digits after each validation."""

    def __init__(self, rows: int = 8) -> None:
        self.rows = rows

    def on_fit_start(self, info: FitInfo) -> None:
        self.model = info.model

    @torch.no_grad()
    def on_validation_end(self, report: EvalInfo) -> Log:
        from torchvision.utils import make_grid

        generator = torch.Generator().manual_seed(0)
        noise = 2 * torch.rand(self.rows**2, NOISE, generator=generator) - 1
        device = next(self.model.parameters()).device
        images = self.model("images", noise.to(device)).view(-1, 1, SIZE, SIZE)  # on all ranks, as fsdp needs
        return Log({"samples": Image(make_grid(images / 2 + 0.5, nrow=self.rows, padding=1))})


def with_noise(batch: list[Tensor], draws: Any) -> list[Tensor]:
    return [batch[0], 2 * draws.uniform(NOISE) - 1]


def digits() -> Datasets:
    """Return scikit-learn's digits, pixels from -1 to 1, each with noise that is redrawn in every epoch."""
    from sklearn.datasets import load_digits

    images_BP = torch.from_numpy(load_digits().data).float() / 8 - 1
    train, val = images_BP[:1600], images_BP[1600:]
    return Datasets(TensorSamples(train, transform=with_noise), TensorSamples(val, transform=with_noise))
