"""What public LightningModules and data modules ask of `self.trainer`, noted in a file.

python -m tests.features.lightning_habits FILE: train with Lightning's own Trainer.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MaxMetric, MeanMetric

# The sizes of the validation sets.
SIZES = (40, 24)
ASKED = (
    "world_size",
    "num_nodes",
    "num_devices",
    "is_global_zero",
    "global_rank",
    "max_epochs",
    "training",
    "validating",
    "testing",
    "predicting",
    "sanity_checking",
    "evaluating",
    "current_epoch",
    "global_step",
    "num_training_batches",
)


def note(file: str, name: str, *values: Any) -> None:
    with Path(file).open("a") as out:
        out.write(json.dumps([name, *values]) + "\n")


def rows(size: int, seed: int) -> TensorDataset:
    x = torch.randn(size, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.sum(1, keepdim=True))


class Data(pl.LightningDataModule):
    """Divides its batch size by the number of processes, as the most-used template does; has two validation sets."""

    def __init__(self, file: str, batch_size: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.file = file
        self.batch_size_per_device = batch_size
        self.input_width = 8

    def note(self, name: str) -> None:
        assert self.trainer is not None
        asked = {each: getattr(self.trainer, each) for each in ASKED if each != "num_training_batches"}
        note(self.file, name, asked)

    def prepare_data(self) -> None:
        self.note("prepare_data")

    def setup(self, stage: str | None = None) -> None:
        if self.trainer is not None:
            if self.hparams["batch_size"] % self.trainer.world_size != 0:
                raise RuntimeError("not divisible by the number of devices")
            self.batch_size_per_device = self.hparams["batch_size"] // self.trainer.world_size
        if stage == "fit":
            self.note("setup")
        self.sets = [rows(size, seed=size) for size in SIZES]

    def train_dataloader(self) -> Any:
        return DataLoader(rows(96, seed=1), batch_size=self.batch_size_per_device)

    def val_dataloader(self) -> Any:
        return [DataLoader(each, batch_size=self.batch_size_per_device) for each in self.sets]


class Module(pl.LightningModule):
    """Averages over its validation sets in one hook; looks at outputs, stages and attributes of the trainer."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file = file
        self.losses: list[Tensor] = []
        self.val_loss = MeanMetric()
        self.val_least = MaxMetric()

    def configure_model(self) -> None:
        self.net = nn.Linear(self.trainer.datamodule.input_width, 1)  # type: ignore[attr-defined]
        nn.init.constant_(self.net.weight, 0.1)
        nn.init.constant_(self.net.bias, 0.0)

    def note(self, name: str, *values: Any) -> None:
        note(self.file, name, {each: getattr(self.trainer, each) for each in ASKED}, *values)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self(batch[0])
        loss = mse_loss(hidden, batch[1])
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        self.log("seen", float(batch_idx))
        self.log("lr", 5.0)
        self.log("train_size", float(len(batch[0])), on_step=False, on_epoch=True, reduce_fx="max")
        return {"loss": loss, "hidden": hidden, "parts": [{"twice": loss * 2}], "name": "a"}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        tensors = (outputs["loss"], outputs["hidden"], outputs["parts"][0]["twice"])
        graphs = [each.requires_grad for each in tensors]
        note(self.file, "outputs", sorted(outputs), graphs, round(float(outputs["loss"]), 5), outputs["name"])

    def on_train_epoch_start(self) -> None:
        self.note("on_train_epoch_start")

    def on_train_epoch_end(self) -> None:
        self.log_dict({"from_epoch_end": float(self.current_epoch), "seen": 7.0, "lr": 3.0, "samples_per_s": 4.0})
        self.note("on_train_epoch_end")

    def on_validation_start(self) -> None:
        self.note("on_validation_start", self.training)

    def on_validation_epoch_start(self) -> None:
        self.losses.clear()
        self.note("on_validation_epoch_start")

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = mse_loss(self(batch[0]), batch[1])
        self.val_loss.update(loss, len(batch[0]))
        self.losses += [loss] * len(batch[0])
        self.log("val_loss", loss)
        note(self.file, "validation_step", batch_idx, dataloader_idx)

    def on_validation_epoch_end(self) -> None:
        mean = torch.stack(self.losses).mean()
        self.log("val_mean", mean)
        self.val_least(self.val_loss.compute())
        self.val_loss.reset()
        self.log("val_worst", self.val_least.compute())
        self.note("on_validation_epoch_end", len(self.losses), round(float(mean), 5))

    def on_validation_end(self) -> None:
        self.note("on_validation_end")

    def configure_optimizers(self) -> Any:
        names = ("nonsense", "max_epochs", "world_size", "datamodule", "logger", "strategy", "callbacks")
        has = {name: hasattr(self.trainer, name) for name in names}
        note(self.file, "has", has, getattr(self.trainer, "nonsense", "no"), hasattr(self.trainer, "log_dir"))
        assert self.trainer.lightning_module is self
        return torch.optim.SGD(self.trainer.model.parameters(), lr=0.05)  # type: ignore[union-attr]


class Metrics(pl.Callback):
    """Notes the metrics after each validation and epoch."""

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self._note(trainer, pl_module, "metrics of validation", "val")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._note(trainer, pl_module, "metrics of epoch", "train", "from")

    def _note(self, trainer: Any, module: Any, name: str, *prefixes: str) -> None:
        values = {key: round(float(value), 5) for key, value in trainer.callback_metrics.items()}
        note(f"{module.file}.metrics", name, {key: value for key, value in values.items() if key.startswith(prefixes)})


if __name__ == "__main__":
    torch.set_num_threads(1)
    plain: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    fit = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        accumulate_grad_batches=2,
        enable_model_summary=False,
        callbacks=[Metrics()],
        **plain,
    )
    fit.fit(Module(sys.argv[1]), datamodule=Data(sys.argv[1]))
