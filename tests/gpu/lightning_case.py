"""A LightningModule that logs numbers and a metric, and its data."""

from __future__ import annotations

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

CLASSES = 4


class Classifier(L.LightningModule):
    """Logs a loss and a plain number in every step, and torchmetrics' accuracy in validation."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.net = nn.Linear(8, CLASSES)
        self.accuracy = MulticlassAccuracy(CLASSES)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        self.log("scale", x.abs().mean())
        self.log("batch", float(batch_idx))
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        scores = self.net(x)
        self.accuracy(scores, y)
        self.log("val_loss", cross_entropy(scores, y))
        self.log("val_acc", self.accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Data(L.LightningDataModule):
    """Vectors whose class is the largest of their first numbers."""

    def __init__(self, size: int = 200) -> None:
        super().__init__()
        self.size = size

    def setup(self, stage: str) -> None:
        x = torch.randn(self.size, 8, generator=torch.Generator().manual_seed(0))
        self.samples = TensorDataset(x, x[:, :CLASSES].argmax(dim=1))

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.samples, batch_size=16, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.samples, batch_size=64)
