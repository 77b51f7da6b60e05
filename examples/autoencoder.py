"""A loss of your own: an autoencoder of scikit-learn's digits that is given noisy images, with early stopping.

python examples/autoencoder.py
"""

from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import framework
from framework import StepOutput
from framework.callbacks import EarlyStopping


class Denoise:
    """A task: what a step computes from the model and a batch of images, (B, 64) with pixels from 0 to 1."""

    def __init__(self, noise: float) -> None:
        self.noise = noise

    def training_step(self, model: nn.Module, images: Tensor) -> StepOutput:
        noisy = images + self.noise * torch.randn_like(images)
        loss = mse_loss(model(noisy), images)
        return StepOutput(loss, len(images))

    def validation_step(self, model: nn.Module, images: Tensor) -> StepOutput:
        restored = model(images)
        loss = mse_loss(restored, images)

        # A metric is a sum over the samples, here of each image's share of good pixels, and their number.
        is_close = (restored - images).abs() < 0.1
        close_share = is_close.float().mean(dim=1)  # (B)
        return StepOutput(loss, len(images), {"within_0.1": (close_share.sum(), len(images))})


images = torch.tensor(load_digits().data, dtype=torch.float32) / 16

run = framework.train(
    model=nn.Sequential(
        nn.Linear(64, 32),
        nn.ReLU(),
        nn.Linear(32, 64),
        nn.Sigmoid(),
    ),
    data=framework.Datasets(train=images[:1500], val=images[1500:], batch_size=50),
    task=Denoise(noise=0.2),
    optimizer=partial(torch.optim.Adam, lr=3e-3),
    callbacks=[EarlyStopping(monitor="val/loss", min_delta=1e-3, patience=2)],
    trainer={"max_epochs": 50, "gpus": 0},
)
results = run.record["results"]
print(results["ended_by"])
print(f"pixels within 0.1: {run.metrics['val/within_0.1']:.2f} after {results['epochs']} epochs")

# The same run, in another program or tomorrow.
loaded = framework.load(run.directory)
model = loaded.best_model()
print(len(loaded.history), "logged steps,", type(model).__name__)
