"""When to save, which checkpoint is `last` and `best`, and which ones are kept."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from framework.checkpoint.layout import BEST, LAST, PARTS, Manifest, manifest_or_none, step_name, step_of
from framework.checkpoint.lookup import complete_steps
from framework.checkpoint.snapshot import Snapshots
from framework.checkpoint.writer import check_plain, clean, point, remove, write
from framework.config.schema import CheckpointConfig
from framework.errors import DiskError

if TYPE_CHECKING:
    import torch.distributed as dist

    from framework.checkpoint.shards import Shards


@final
class CheckpointManager:
    """Saves the checkpoints of one run. Every rank has one. `close` it.

    By default training waits only while the state is copied; a thread writes the copy. The ranking is read back from
    the manifests on the disk when a run is resumed.
    """

    def __init__(
        self,
        settings: CheckpointConfig,
        folder: Path,
        *,
        config_text: str,
        is_writer: bool,
        warn: Callable[[str], None],
        shard_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Remove what a killed save has left.

        Args:
            folder: the run's checkpoints folder.
            config_text: each checkpoint's config.yaml.
            is_writer: this rank, and no other, writes.
            warn: called, maybe from the thread, with the reason why a save failed; training continues.
            shard_group: all ranks, for a sharded model, of which each writes its shards and the writer everything else;
                a process group that is used for nothing else.
        """
        self._settings = settings
        self._folder = folder
        self._config_text = config_text
        self._is_writer = is_writer
        self._warn = warn
        self._shard_group = shard_group
        self._snapshots = Snapshots()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None  # at most one: the next save waits for it
        self._failure: str | None = None  # of the last save
        self._saved_s = time.monotonic()
        self._scores: dict[int, float] = {}  # step → the monitored metric, NaN if there is none
        self._abandoned: set[int] = set()  # steps after the one resumed from
        if is_writer and folder.is_dir():
            clean(folder)
            self._scores = {step: self._score(found[1].metrics) for step, found in complete_steps(folder).items()}

    @property
    def monitor(self) -> str | None:
        """The metric that decides which checkpoint is `best`; None without one."""
        return self._settings.monitor

    @property
    def best(self) -> Manifest | None:
        """The manifest of the best checkpoint; None without one, and on ranks other than the writer. `wait` first."""
        ranking = self._ranking()
        return manifest_or_none(self._folder / step_name(ranking[0])) if ranking else None

    def due_step(self, step: int) -> bool:
        """Return True if a save is due after optimizer step `step`, counted from 1."""
        every = self._settings.every_n_steps
        return every is not None and step % every == 0

    def due_epoch(self, epoch: int) -> bool:
        """Return True if a save is due at the end of `epoch`, counted from 0."""
        every = self._settings.every_n_epochs
        return every is not None and (epoch + 1) % every == 0

    def due_time(self) -> bool:
        """Return True if the last save is old enough, by the writer's clock; False on other ranks."""
        every = self._settings.every_n_minutes
        if not self._is_writer or every is None:
            return False
        return time.monotonic() - self._saved_s >= every * 60.0

    def save(self, state: Mapping[str, Any], *, step: int, epoch: int, metrics: Mapping[str, float] | None) -> None:
        """Begin to write a checkpoint; then `last` and `best` move, and checkpoints that aren't kept are deleted.

        Kept are the save_last_k newest, the save_top_k best (all with -1), and what any symlink in the folder names.

        Every rank must call it. Waits for the previous save. Raises CheckpointError on the writer if it can't save the
        state. A disk error is reported through `warn` and by `wait`; any other error of the previous save is raised.

        Args:
            state: `model`, `training`, `generators` (see layout.py), of which only the writer's is used. Of a sharded
                model `shards` instead of `model`: the `Shards` that this rank writes.
            metrics: of an evaluation of exactly these weights, None without one. Only with them can it become `best`.
        """
        if not self._is_writer and self._shard_group is None:
            return
        self._wait()
        self._saved_s = time.monotonic()
        own = {part: state[part] for part in PARTS if part in state} if self._is_writer else {}
        for part, value in own.items():
            # Entries of `training` are named as the user knows them: callbacks.early_stopping, not training.callbacks…
            check_plain(value, name="" if part == "training" else part)
        shards: Shards | None = state.get("shards")
        tensors = {} if shards is None else shards.tensors
        if self._settings.asynchronous:
            own, tensors = self._snapshots.take((own, tensors))
        if shards is not None:
            shards = replace(shards, tensors=tensors, group=self._shard_group)
        write_state = partial(self._write, own, shards, step=step, epoch=epoch, metrics=dict(metrics or {}))
        if self._settings.asynchronous:
            self._writing = self._thread.submit(write_state)
        else:
            write_state()

    def resume_from(self, step: int, *, damaged: Collection[int] = ()) -> None:
        """Rank only undamaged checkpoints up to `step`. The next save deletes later ones, unless all are kept."""
        self._scores = {at: score for at, score in self._scores.items() if at not in damaged}
        self._abandoned = {at for at in self._scores if at > step}
        self._scores = {at: score for at, score in self._scores.items() if at <= step}
        if self._is_writer:
            self._move_best()
            if not self._ranking() and (self._folder / BEST).is_symlink():
                (self._folder / BEST).unlink()  # an abandoned one

    def wait(self) -> str | None:
        """Wait until nothing is being written. Return why the last save failed, and the last good checkpoint.

        None if it didn't fail, and on other ranks. Raises other errors than the disk's.
        """
        self._wait()
        if self._failure is None:
            return None
        last = self._folder / LAST
        good = f"The last good checkpoint is {last.resolve().name}." if last.exists() else "There is no checkpoint."
        return f"{self._failure}\n{good}"

    def close(self) -> None:
        """Finish writing, and end the thread. Raises no error of the writing: `wait` does."""
        self._thread.shutdown(wait=True)

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(
        self, state: Mapping[str, Any], shards: Shards | None, *, step: int, epoch: int, metrics: Mapping[str, float]
    ) -> None:
        """Write the checkpoint and, on the writer, do everything that follows from it."""
        try:
            self._snapshots.wait()
            write(
                self._folder,
                state,
                step=step,
                epoch=epoch,
                metrics=metrics,
                config_text=self._config_text,
                shards=shards,
            )
            if self._is_writer:
                self._point_and_clean(step, metrics)
            self._failure = None
        except DiskError as error:
            self._failure = str(error)
            if self._is_writer:
                self._warn(f"{error}\nTraining continues without it.")

    def _point_and_clean(self, step: int, metrics: Mapping[str, float]) -> None:
        """Move `last` and `best` after a save, and delete checkpoints that aren't kept."""
        self._scores[step] = self._score(metrics)
        point(self._folder, LAST, step=step)
        # The checkpoint is saved; a failure from here on only leaves an old `best` or files that aren't needed.
        self._abandoned.discard(step)
        self._move_best()
        for other in self._others(step):
            try:
                remove(self._folder / step_name(other))
            except DiskError as error:
                self._warn(str(error))
            self._scores.pop(other, None)
            self._abandoned.discard(other)

    def _score(self, metrics: Mapping[str, float]) -> float:
        monitor = self._settings.monitor
        return math.nan if monitor is None else metrics.get(monitor, math.nan)

    def _ranking(self) -> list[int]:
        """Return the steps with a finite score from best to worst; of equal scores, the earlier is better."""
        sign = 1 if self._settings.mode == "min" else -1
        ranked = [step for step, score in self._scores.items() if math.isfinite(score)]
        return sorted(ranked, key=lambda step: (sign * self._scores[step], step))

    def _move_best(self) -> None:
        self._scores = {
            step: score for step, score in self._scores.items() if (self._folder / step_name(step)).is_dir()
        }  # someone may have deleted one by hand
        ranking = self._ranking()
        if self._settings.save_top_k == 0 or not ranking:
            return
        try:
            point(self._folder, BEST, step=ranking[0])
        except DiskError as error:
            self._warn(str(error))

    def _others(self, last: int) -> list[int]:
        """Return the steps to delete once `last` is saved."""
        if self._settings.save_top_k == -1:
            return []
        newest = sorted(step for step in self._scores if step <= last)[-self._settings.save_last_k :]
        kept = {*self._ranking()[: self._settings.save_top_k], *newest} | self._named_by_symlinks()
        return sorted((self._scores.keys() | self._abandoned) - kept)

    def _named_by_symlinks(self) -> set[int]:
        links = [path for path in self._folder.iterdir() if path.is_symlink()]
        steps = {step_of(link.readlink().name) for link in links}
        return {step for step in steps if step is not None}
