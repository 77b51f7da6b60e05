"""What `job=tune` leaves, each thing as soon as it is found: tune.json, the picture of the range test, and its curves.

Rank 0 leaves it; on the other ranks all of this does nothing. See `jobs/tune.py` for the keys of tune.json.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, final

from framework import build
from framework.data.batching import BatchPlan
from framework.progress import hooks
from framework.run_dir import write_atomically
from framework.session import Rank
from framework.trainer import Trainer
from framework.tune.picture import draw
from framework.tune.suggesting import Curve, suggest
from framework.types import FitInfo, Logger

RESULT, PICTURE = "tune.json", "learning_rate.svg"

logger = logging.getLogger(__name__)


@final
class Findings:
    """Everything found so far. `close` must be called at the end."""

    def __init__(self, rank: Rank) -> None:
        """rank: with the loggers that were asked for. Raises what they raise, before anything is looked for."""
        self._run_dir, self._is_main = rank.run_dir, rank.context.is_main
        self._recipe = rank.config.recipe
        self._loggers: dict[str, Logger] = {}
        if self._is_main:
            self._loggers = build.build_loggers(rank.config.logger, run_dir=rank.run_dir)
        self._batch: dict[str, Any] | None = None
        self._rates: dict[str, Any] | None = None
        self._processes = rank.context.world_size
        self._overrides: dict[str, float] = {}

    def keep_batch(self, batch: Mapping[str, Any], overrides: Mapping[str, float]) -> None:
        """The batch, which each process has tried by itself so far."""
        self._batch = {**batch, "together": False}
        self._overrides |= overrides
        self._write()

    def keep_together(self) -> None:
        """That steps of the whole run were made, with the batch where one was looked for."""
        if self._batch is not None and not self._batch["together"]:
            self._batch["together"] = True
            self._write()

    def keep_rates(self, curve: Curve, plan: BatchPlan, *, key: str) -> None:
        """What the range test says. key: that a rate is to be typed for."""
        suggestion = suggest(curve.points)
        self._rates = {
            "global_batch_size": plan.global_batch_size,
            "stopped": curve.stopped,
            "suggestion": None if suggestion is None else asdict(suggestion),
            # JSON has no number that isn't finite.
            "points": [
                asdict(each) | {"loss": each.loss if math.isfinite(each.loss) else None} for each in curve.points
            ],
        }
        if suggestion is not None:
            self._overrides[key] = float(f"{suggestion.lr:.2g}")
        self._write()

    def show(self, curve: Curve, plan: BatchPlan, trainer: Trainer) -> None:
        """Draw the curve, and give it to the loggers. What can't be shown is told and ends nothing."""
        if not self._is_main:
            return
        self._tell(lambda: self._draw(curve, plan), what=f"{PICTURE} can't be drawn")
        info = _fit_info(trainer, steps=len(curve.points))
        for name, each in self._loggers.items():
            self._tell(lambda each=each: _log(each, curve, info), what=f"logger.{name} failed")  # type: ignore[misc]

    def close(self) -> None:
        for name, each in self._loggers.items():
            self._tell(each.close, what=f"logger.{name} can't be closed")

    def _write(self) -> None:
        if not self._is_main:
            return
        content = {
            "recipe": self._recipe,
            "processes": self._processes,
            "batch_size": self._batch,
            "lr": self._rates,
            "overrides": self._overrides,
        }
        write_atomically(self._run_dir.path / RESULT, json.dumps(content, indent=2) + "\n")
        self._run_dir.update_run({"results": {"overrides": self._overrides}})

    def _draw(self, curve: Curve, plan: BatchPlan) -> None:
        title = f"{self._recipe}: {plan.global_batch_size:,} samples a step"
        write_atomically(self._run_dir.path / PICTURE, draw(curve.points, suggest(curve.points), title=title))

    def _tell(self, show: Callable[[], object], *, what: str) -> None:
        try:
            show()
        except Exception as error:  # the user's code may raise anything
            logger.warning("%s; what was found is in %s", what, self._run_dir.path / RESULT, exc_info=error)


def _fit_info(trainer: Trainer, *, steps: int) -> FitInfo:
    return FitInfo(
        model=trainer.parts.bare_model,
        start_step=0,
        total_steps=steps,
        steps_per_epoch=trainer.train_loader.steps_per_epoch,
        max_epochs=None,
        optimizer=trainer.parts.optimizer,
    )


def _log(one: Logger, curve: Curve, info: FitInfo) -> None:
    for start in hooks([one], "fit_start"):
        start(info)
    for step, point in enumerate(curve.points, start=1):
        values = {"tune/lr": point.lr, "tune/loss": point.loss, "tune/smoothed_loss": point.smoothed}
        one.metrics({name: value for name, value in values.items() if value is not None}, step=step, epoch=0)
