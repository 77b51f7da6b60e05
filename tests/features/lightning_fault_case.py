"""A LightningModule and its data, one target of which is NaN."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from framework import Datasets


class Lit(pl.LightningModule):
    """A LightningModule that may make its optimizer's steps itself."""

    def __init__(self, automatic: bool = True, inputs: int = 4, outputs: int = 1) -> None:
        super().__init__()
        self.automatic_optimization = automatic
        self.first = nn.Linear(inputs, 8)
        self.second = nn.Linear(8, outputs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = mse_loss(self.second(self.first(x).tanh()), y)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def rootless() -> Datasets:
    """Return the data of Lit: the target of sample 50 is NaN."""
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    y = x[:, :1].abs()
    y[50] = float("nan")
    return Datasets(TensorDataset(x, y))
