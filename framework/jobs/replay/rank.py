"""One rank of a training that repeats steps of a run."""

from __future__ import annotations

import os
from dataclasses import replace

from framework.engine.train import run_rank
from framework.launch.plan import MonitorLink, RankArguments
from framework.training.trainer import Trainer
from framework.types import Callback, FitInfo, hooks


def replay_rank(arguments: RankArguments, link: MonitorLink) -> int | None:
    """Train, and give the trainer to each callback with a method `observe_trainer`."""
    if link.is_watched:
        # `breakpoint()` is for the rank that is in the command's process: the others have no terminal.
        os.environ["PYTHONBREAKPOINT"] = "0"
    return run_rank(arguments, link, before_fit=_introduce)


def _introduce(trainer: Trainer) -> None:
    for observe in hooks(trainer.state.callbacks.values(), "observe_trainer"):
        observe(trainer)


class StopAfter(Callback):
    """Ends the training after a step, on all ranks at once."""

    def __init__(self, step: int) -> None:
        self._step = step

    def observe_trainer(self, trainer: Trainer) -> None:
        self._trainer = trainer
        # These steps were made, whatever came of them.
        trainer.logbook.refuses_bad_losses = False

    def on_fit_start(self, info: FitInfo) -> None:
        # Not before: `info` and the schedules have the length of the whole run.
        self._trainer.settings = replace(self._trainer.settings, max_steps=self._step)
