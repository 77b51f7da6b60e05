"""Lightning's Trainer as it comes, but without checkpoints: whole epochs, with a validation after each."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.marks import Intervals
from benchmarks.peers.work import Splits, splits


class Module(LightningModule):
    def __init__(self, work: Splits, intervals: Intervals) -> None:
        super().__init__()
        self.model = work.model
        self.loss = work.loss
        self._work = work
        self._intervals = intervals

    def on_fit_start(self) -> None:
        self._intervals.start()

    def training_step(self, batch: Any, index: int) -> Any:
        self._intervals.tick()
        inputs, targets = batch
        loss = self.loss(self.model(inputs), targets)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        inputs, targets = batch
        self.log("val/loss", self.loss(self.model(inputs), targets))

    def on_fit_end(self) -> None:
        self._intervals.finish()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._work.optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", choices=("toy", "digits"), required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--steps-per-epoch", type=int, required=True)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    work = splits(asked.work)
    train = DataLoader(TensorDataset(*work.train), batch_size=work.batch, shuffle=True)
    val = DataLoader(TensorDataset(*work.val), batch_size=256)
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=asked.epochs, enable_checkpointing=False)
    trainer.fit(Module(work, Intervals(asked.steps_per_epoch)), train, val)


if __name__ == "__main__":
    main()
