"""A loss of your own: an autoencoder of scikit-learn's digits that is given noisy images, with early stopping.

python examples/autoencoder.py
"""

from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import framework
from framework import StepOutput
from framework.callbacks import EarlyStopping


class Denoise:
    """A task: what a step computes from the model and a batch of images, shape (B, 64), of 0 to 1."""

    def __init__(self, noise: float) -> None:
        self.noise = noise

    def training_step(self, model: nn.Module, images: Tensor) -> StepOutput:
        noisy = images + self.noise * torch.randn_like(images)
        return StepOutput(nn.functional.mse_loss(model(noisy), images), len(images))

    def validation_step(self, model: nn.Module, images: Tensor) -> StepOutput:
        restored = model(images)
        within = ((restored - images).abs() < 0.1).float().mean(dim=1)
        return StepOutput(
            nn.functional.mse_loss(restored, images), len(images), {"within_0.1": (within.sum(), len(images))}
        )


images = torch.tensor(load_digits().data, dtype=torch.float32) / 16

run = framework.train(
    model=nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64), nn.Sigmoid()),
    data=framework.Datasets(images[:1500], images[1500:], batch_size=50),
    task=Denoise(noise=0.2),
    optimizer=partial(torch.optim.Adam, lr=3e-3),
    callbacks=[EarlyStopping(monitor="val/loss", min_delta=1e-3, patience=2)],
    trainer={"max_epochs": 50, "gpus": 0},
)
print(run.record["results"]["ended_by"])
print(f"pixels within 0.1: {run.metrics['val/within_0.1']:.2f} after {run.record['results']['epochs']} epochs")

again = framework.load(run.directory)  # in another program, or tomorrow
print(len(again.history), "logged steps,", type(again.best_model()).__name__)
