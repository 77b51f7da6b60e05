"""When to save, which checkpoint is `last` and `best`, and which ones are kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

from framework.checkpoint.format import BEST, LAST, step_name, step_of
from framework.checkpoint.lookup import complete_steps
from framework.checkpoint.store import point, remove, write
from framework.config.schema import CheckpointConfig, Mode
from framework.config.suggest import did_you_mean, nearest
from framework.errors import ConfigError


@final
class CheckpointManager:
    """The checkpoints of one run. Every rank has one; the one that `is_writer` writes.

    folder: the run's checkpoints folder. config_text: what goes into each as config.yaml. barrier: returns once every
    rank has called it. The ranking is read back from the manifests on the disk, so it goes on when a run is resumed.
    """

    def __init__(
        self,
        settings: CheckpointConfig,
        folder: Path,
        *,
        config_text: str,
        is_writer: bool,
        barrier: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._config_text = config_text
        self._is_writer = is_writer
        self._barrier = barrier
        self._scores: dict[int, float] = {}  # step → the monitored metric, NaN where there is none
        if is_writer and settings.enabled:
            self._scores = {step: self._score(found[1].metrics) for step, found in complete_steps(folder).items()}

    @property
    def monitor(self) -> str | None:
        """The metric that decides which checkpoint is `best`; None without one, or where none is saved."""
        return self._settings.monitor if self._settings.enabled else None

    @property
    def best_score(self) -> float | None:
        """The monitored metric of the best checkpoint there has been; the writer's, None on the others and before."""
        ranking = self._ranking() if self.monitor is not None else []
        return self._scores[ranking[0]] if ranking else None

    def due_step(self, step: int) -> bool:
        """Whether to save after optimizer step `step`, counted from 1."""
        every = self._settings.every_n_steps
        return self._settings.enabled and every is not None and step % every == 0

    def due_epoch(self, epoch: int) -> bool:
        """Whether to save at the end of `epoch`, counted from 0."""
        every = self._settings.every_n_epochs
        return self._settings.enabled and every is not None and (epoch + 1) % every == 0

    def save(self, state: Mapping[str, Any], *, step: int, epoch: int, metrics: Mapping[str, float] | None) -> None:
        """Write a checkpoint, move `last` and `best`, delete those not to be kept. Every rank must call it.

        state: `model`, `training`, `generators` (see format.py); only the writer's is used. metrics: of an evaluation
        of just these weights, None without one; only such a checkpoint can become `best`. Kept are `last`, the
        save_top_k best ones (all with -1) and what any symlink in the
        folder names. Raises ConfigError on every rank where the monitor isn't among the metrics; CheckpointError or
        RunError on the writer alone, while the others wait at the barrier until the run is ended. Does nothing where
        checkpoints are not enabled.
        """
        if not self._settings.enabled:
            return
        self._check_monitor(metrics)
        if self._is_writer:
            known = metrics or {}
            write(self._folder, state, step=step, epoch=epoch, metrics=known, config_text=self._config_text)
            self._scores[step] = self._score(known)
            point(self._folder, LAST, step=step)
            self._move_best()
            self._delete_others()
        self._barrier()

    def _check_monitor(self, metrics: Mapping[str, float] | None) -> None:
        monitor = self._settings.monitor
        if monitor is None or metrics is None or monitor in metrics:
            return
        raise ConfigError(
            f"checkpoint.monitor={monitor} is not a metric of the evaluation.\n"
            f"There are: {', '.join(metrics) or 'none'}.{did_you_mean(nearest(monitor, metrics))}"
        )

    def _score(self, metrics: Mapping[str, float]) -> float:
        monitor = self._settings.monitor
        return math.nan if monitor is None else metrics.get(monitor, math.nan)

    def _ranking(self) -> list[int]:
        """Steps from best to worst; those without a finite score have no place. Of equals the earlier one is better."""
        sign = 1 if self._settings.mode is Mode.MIN else -1
        ranked = [step for step, score in self._scores.items() if math.isfinite(score)]
        return sorted(ranked, key=lambda step: (sign * self._scores[step], step))

    def _move_best(self) -> None:
        self._scores = {
            step: score for step, score in self._scores.items() if (self._folder / step_name(step)).is_dir()
        }  # someone may have deleted one by hand
        ranking = self._ranking()
        if self._settings.save_top_k != 0 and ranking:
            point(self._folder, BEST, step=ranking[0])

    def _delete_others(self) -> None:
        if self._settings.save_top_k == -1:
            return
        kept = set(self._ranking()[: self._settings.save_top_k]) | self._named_by_symlinks()
        for step in sorted(set(self._scores) - kept):
            remove(self._folder / step_name(step))
            del self._scores[step]

    def _named_by_symlinks(self) -> set[int]:
        links = [path for path in self._folder.iterdir() if path.is_symlink()]
        steps = {step_of(link.readlink().name) for link in links}
        return {step for step in steps if step is not None}
