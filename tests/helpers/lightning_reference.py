"""Trains the modules of `tests.features.lightning_cases` with Lightning's own Trainer. Run as a process of its own:

python -m tests.helpers.lightning_reference FILE NAME...
"""

from __future__ import annotations

import sys
from typing import Any

import lightning.pytorch as pl
import torch

from tests.features import lightning_cases


class Recorder(pl.Callback):
    """Keeps the loss of each batch, the metrics after each validation and at the end of each epoch, and rates."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.lrs: list[float] = []
        self.validations: list[dict[str, float]] = []
        self.epochs: list[dict[str, float]] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.lrs.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"].item())

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.validations.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        self.epochs.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def train(name: str) -> dict[str, Any]:
    settings = dict(lightning_cases.CASES[name])
    data = lightning_cases.Data(kind=settings.pop("kind"))
    module = getattr(lightning_cases, name)()
    recorder = Recorder()
    plain: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=lightning_cases.EPOCHS,
        callbacks=[recorder],
        enable_model_summary=False,
        **plain,
        **settings,
    )
    trainer.fit(module, datamodule=data)
    kept = {each: getattr(recorder, each) for each in ("losses", "lrs", "validations", "epochs")}
    return {"weights": dict(module.state_dict()), **kept}


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.save({name: train(name) for name in sys.argv[2:]}, sys.argv[1])
