"""Lightning's Trainer: with everything off, with `self.log`, and as it comes."""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from benchmarks.marks import Stopwatch, report
from benchmarks.peers.work import Work, loader, make, parser

OFF: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
}


class Module(LightningModule):
    """Ticks where a step begins, so that no callback of ours is measured."""

    def __init__(self, work: Work, stopwatch: Stopwatch, *, logs: bool, first_step: bool) -> None:
        super().__init__()
        self.model = work.model
        self.loss = work.loss
        self._work = work
        self._stopwatch = stopwatch
        self._logs = logs
        self._first_step = first_step

    def training_step(self, batch: Any, index: int) -> Any:
        self._stopwatch.tick()
        if self._stopwatch.is_done:
            self.trainer.should_stop = True
        inputs, targets = batch
        loss = self.loss(self.model(inputs), targets)
        if self._logs:
            self.log("train/loss", loss, prog_bar=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._first_step:
            self._first_step = False
            report(first_step=time.time())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._work.optimizer


def trainer(asked: argparse.Namespace, *, max_steps: int) -> Trainer:
    settings = {"defaults": {}, "no-checkpoints": {"enable_checkpointing": False}}.get(asked.set_up, OFF)
    accelerator = "cpu" if asked.device == "cpu" else "gpu"
    strategy = "ddp" if asked.processes > 1 else "auto"
    return Trainer(
        accelerator=accelerator,
        devices=asked.processes,
        strategy=strategy,
        max_steps=max_steps,
        max_epochs=-1,
        **settings,
    )


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--set-up", choices=("off", "log", "no-checkpoints", "defaults"), default="defaults")
    arguments.add_argument("--first-step", action="store_true", help="report when it was done, nothing else")
    asked = arguments.parse_args()
    work = make(asked)
    synchronize = None if asked.device == "cpu" else torch.cuda.synchronize
    stopwatch = Stopwatch(asked.warm_up, asked.steps, seconds=asked.seconds, synchronize=synchronize)
    if asked.first_step:
        stopwatch.tick = int  # type: ignore[method-assign,assignment]
    module = Module(work, stopwatch, logs=asked.set_up != "off", first_step=asked.first_step)
    # With seconds the module ends it, which looks once a step.
    trainer(asked, max_steps=stopwatch.last if asked.seconds == 0 else -1).fit(module, loader(work, asked))


if __name__ == "__main__":
    main()
