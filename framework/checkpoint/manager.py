"""Save the checkpoints of a run: when one is due, writing it beside training, and moving `last` and `best`."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, final

from framework.checkpoint.layout import BEST, LAST, PARTS, Manifest, step_name, steps_of
from framework.checkpoint.retention import Retention
from framework.checkpoint.snapshot import Snapshots
from framework.checkpoint.storage import CheckpointStorage, LocalStorage, disk_errors
from framework.checkpoint.writer import check_plain, delete, point, write
from framework.config.schema import CheckpointConfig
from framework.errors import CheckpointError, DiskError

if TYPE_CHECKING:
    import torch.distributed as dist

    from framework.checkpoint.shards import Shards


@final
class CheckpointManager:
    """Saves the checkpoints of one run. Every rank has one. `close` it.

    By default training waits only while the state is copied; a thread writes the copy. When a run is resumed, the
    ranking is read back from the manifests.
    """

    def __init__(
        self,
        settings: CheckpointConfig,
        storage: CheckpointStorage,
        *,
        config_text: str,
        is_writer: bool,
        warn: Callable[[str], None],
        shard_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Remove what a killed save has left.

        Args:
            storage: where the checkpoints are kept; a `LocalStorage` if the model is sharded.
            config_text: each checkpoint's config.yaml.
            is_writer: this rank, and no other, writes.
            warn: called, maybe from the thread, with the reason why a save failed; training continues.
            shard_group: all ranks, for a sharded model, of which each writes its shards and the writer everything else;
                a process group that is used for nothing else.
        """
        if shard_group is not None and not isinstance(storage, LocalStorage):
            raise CheckpointError(
                f"Checkpoints of a sharded model can't be written to {storage}: torch.distributed.checkpoint writes to "
                "paths. Use a LocalStorage."
            )
        self._settings = settings
        self._storage = storage
        self._config_text = config_text
        self._is_writer = is_writer
        self._warn = warn
        self._shard_group = shard_group
        self._retention = Retention(settings)
        self._snapshots = Snapshots()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        # At most one save is being written: the next one waits for it.
        self._writing: Future[None] | None = None
        # Why the last save failed; None if it didn't.
        self._failure: str | None = None
        # When the last save began.
        self._saved_s = time.monotonic()

        if is_writer:
            storage.clean()
            for step, manifest in storage.complete_steps().items():
                self._retention.add(step, manifest.metrics)

    # When to save

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

    # Saving

    def save(self, state: Mapping[str, Any], *, step: int, epoch: int, metrics: Mapping[str, float] | None) -> None:
        """Begin to write a checkpoint; then `last` and `best` move, and what isn't kept (see `Retention`) is deleted.

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

        parts: dict[str, Any] = {}
        if self._is_writer:
            parts = {part: state[part] for part in PARTS if part in state}
        for part, value in parts.items():
            # Entries of `training` are named as the user knows them: callbacks.early_stopping, not training.callbacks…
            check_plain(value, name="" if part == "training" else part)

        shards: Shards | None = state.get("shards")
        if shards is not None:
            shards = replace(shards, group=self._shard_group)

        write_now = partial(self._write, step=step, epoch=epoch, metrics=dict(metrics or {}))
        if not self._settings.asynchronous:
            write_now(parts, shards)
            return
        # The thread writes copies, since training changes the state meanwhile.
        if shards is None:
            parts = self._snapshots.take(parts)
        else:
            parts, tensors = self._snapshots.take((parts, shards.tensors))
            shards = replace(shards, tensors=tensors)
        self._writing = self._thread.submit(write_now, parts, shards)

    def wait(self) -> str | None:
        """Wait until nothing is being written. Return why the last save failed, and the last good checkpoint.

        None if it didn't fail, and on other ranks. Raises other errors than the disk's.
        """
        self._wait()
        if self._failure is None:
            return None
        last = self._storage.pointers().get(LAST)
        if last is None or last not in self._storage.list():
            return f"{self._failure}\nThere is no checkpoint."
        return f"{self._failure}\nThe last good checkpoint is {last}."

    def close(self) -> None:
        """Finish writing, and end the thread. Raises no error of the writing: `wait` does."""
        self._thread.shutdown(wait=True)

    def _wait(self) -> None:
        writing = self._writing
        self._writing = None
        if writing is not None:
            writing.result()

    def _write(
        self, parts: Mapping[str, Any], shards: Shards | None, *, step: int, epoch: int, metrics: Mapping[str, float]
    ) -> None:
        """Write the checkpoint; on the writer move the pointers, and delete what isn't kept."""
        try:
            self._snapshots.wait()
            write(
                self._storage,
                parts,
                step=step,
                epoch=epoch,
                metrics=metrics,
                config_text=self._config_text,
                shards=shards,
            )
            if self._is_writer:
                with disk_errors(f"The checkpoints in {self._storage} can't be listed"):
                    self._point_and_delete(step, metrics)
            self._failure = None
        except DiskError as error:
            self._failure = str(error)
            if self._is_writer:
                self._warn(f"{error}\nTraining continues without it.")

    # What follows from a save

    @property
    def monitor(self) -> str | None:
        """The metric that decides which checkpoint is `best`; None without one."""
        return self._settings.monitor

    @property
    def best(self) -> Manifest | None:
        """The manifest of the best checkpoint; None without one, and on ranks other than the writer. `wait` first."""
        ranking = self._retention.ranking()
        if not ranking:
            return None
        return self._storage.manifest_or_none(step_name(ranking[0]))

    def resume_from(self, step: int, *, damaged: Collection[int] = ()) -> None:
        """Rank only undamaged checkpoints up to `step`. The next save deletes later ones, unless all are kept."""
        self._retention.resume_from(step, damaged=damaged)
        if not self._is_writer:
            return
        self._move_best()
        if not self._retention.ranking() and BEST in self._storage.pointers():
            # `best` names a checkpoint that is abandoned or damaged.
            self._storage.delete(BEST)

    def _point_and_delete(self, step: int, metrics: Mapping[str, float]) -> None:
        """Move `last` and `best` after a save, and delete checkpoints that aren't kept."""
        self._retention.add(step, metrics)
        point(self._storage, LAST, step=step)

        # The checkpoint is saved; a failure from here on only leaves an old `best` or files that aren't needed.
        self._move_best()
        pointed = steps_of(self._storage.pointers().values())
        for other in self._retention.to_delete(step, pointed=pointed):
            try:
                delete(self._storage, other)
            except DiskError as error:
                self._warn(str(error))
            self._retention.remove(other)

    def _move_best(self) -> None:
        self._retention.remove_missing(steps_of(self._storage.list()))
        ranking = self._retention.ranking()
        if self._settings.save_top_k == 0 or not ranking:
            return
        try:
            point(self._storage, BEST, step=ranking[0])
        except DiskError as error:
            self._warn(str(error))
