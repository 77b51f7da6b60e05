"""Which checkpoint is the best, and which ones are deleted. `last` is always the one that was saved last. No torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import final

from framework.config.schema import CheckpointConfig


@final
class Retention:
    """Ranks the checkpoints of a run by the monitored metric. Decides only; the manager deletes.

    Kept are the `save_last_k` newest, the `save_top_k` best (all with -1), and what any pointer names.
    """

    def __init__(self, settings: CheckpointConfig) -> None:
        self._settings = settings
        # The monitored metric of each step; NaN if there is none.
        self._scores: dict[int, float] = {}
        # Checkpoints of steps after the one that training was resumed from.
        self._abandoned: set[int] = set()

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Rank a checkpoint, by the metrics of an evaluation of its weights."""
        monitor = self._settings.monitor
        self._scores[step] = math.nan
        if monitor is not None and monitor in metrics:
            self._scores[step] = metrics[monitor]
        self._abandoned.discard(step)

    def remove(self, step: int) -> None:
        """Forget a checkpoint that was deleted."""
        self._scores.pop(step, None)
        self._abandoned.discard(step)

    def remove_missing(self, steps: Collection[int]) -> None:
        """Rank only checkpoints of these steps: someone may have deleted others by hand."""
        for step in self._scores.keys() - set(steps):
            del self._scores[step]

    def resume_from(self, last: int, *, damaged: Collection[int]) -> None:
        """Rank only undamaged checkpoints up to `last`. Later ones are to be deleted."""
        for step in list(self._scores):
            if step in damaged:
                del self._scores[step]
            elif step > last:
                del self._scores[step]
                self._abandoned.add(step)

    def ranking(self) -> list[int]:
        """Return the steps with a finite score from best to worst; of equal scores, the earlier is better."""
        sign = 1 if self._settings.mode == "min" else -1
        ranked = [step for step, score in self._scores.items() if math.isfinite(score)]
        return sorted(ranked, key=lambda step: (sign * self._scores[step], step))

    def to_delete(self, last: int, *, pointed: Collection[int]) -> list[int]:
        """Return the steps to delete once `last` is saved.

        Args:
            pointed: the steps that pointers name: `last`, `best` and the user's own.
        """
        if self._settings.save_top_k == -1:
            return []
        newest = sorted(step for step in self._scores if step <= last)[-self._settings.save_last_k :]
        best = self.ranking()[: self._settings.save_top_k]
        kept = {*newest, *best, *pointed}
        return sorted((self._scores.keys() | self._abandoned) - kept)
