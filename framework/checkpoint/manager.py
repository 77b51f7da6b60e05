"""When to save, how training goes on meanwhile, which checkpoint is `last` and `best`, and which ones are kept."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from torch import Tensor

from framework.checkpoint.format import BEST, LAST, Manifest, step_name, step_of
from framework.checkpoint.lookup import complete_steps, manifest_if_complete
from framework.checkpoint.room import require_room
from framework.checkpoint.snapshot import KeptBuffers, Snapshot, bytes_of, fingerprints, take
from framework.checkpoint.store import WriteShards, check_state, clean, disk_errors, mend_pointer, point, remove, write
from framework.config.schema import CheckpointConfig, Mode
from framework.config.suggest import did_you_mean, nearest
from framework.errors import ConfigError, DiskError

if TYPE_CHECKING:
    from framework.checkpoint.sharded import Shards
    from framework.checkpoint.together import Together

_SHARDED = "sharded"
"""The entry of a state that every rank has a part of."""


@dataclass(frozen=True)
class _Save:
    """What is written beside a checkpoint's state."""

    step: int
    epoch: int
    metrics: Mapping[str, float]
    shards: Shards | None  # whose tensors are in the state


@final
class CheckpointManager:
    """The checkpoints of one run. Every rank has one; the one that `is_writer` writes, in a thread of its own.

    folder: the run's checkpoints folder. config_text: what goes into each as config.yaml. warn: is told, maybe from
    that thread, of a save that failed; training goes on. together: of all ranks, where the model is spread over them:
    then each writes its part, in its thread, and the writer everything else. The ranking is read back from the
    manifests on the disk, so it goes on when a run is resumed. `close` it.
    """

    def __init__(
        self,
        settings: CheckpointConfig,
        folder: Path,
        *,
        config_text: str,
        is_writer: bool,
        warn: Callable[[str], None],
        together: Together | None = None,
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._config_text = config_text
        self._is_writer = is_writer
        self._warn = warn
        self._together = together
        self._buffers = KeptBuffers()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None  # at most one: the next save waits for it
        self._copying: tuple[Snapshot, _Save] | None = None
        self._copies_at_once = False
        self._failure: str | None = None  # of the last save
        self._saved_s = time.monotonic()
        self._scores: dict[int, float] = {}  # step → the monitored metric, NaN where there is none
        self._given_up: set[int] = set()  # steps of training that was gone back behind
        self._watched: list[Tensor] = []
        self._marks: list[int] = []  # of what is watched, as it was
        if is_writer and settings.enabled and folder.is_dir():
            clean(folder)  # what a killed save has left takes room
            for pointer in (LAST, BEST):
                mend_pointer(folder, pointer)
            self._scores = {step: self._score(found[1].metrics) for step, found in complete_steps(folder).items()}

    @property
    def monitor(self) -> str | None:
        """The metric that decides which checkpoint is `best`; None without one, or where none is saved."""
        return self._settings.monitor if self._settings.enabled else None

    @property
    def best(self) -> Manifest | None:
        """The manifest of the best checkpoint; None without one, and on ranks other than the writer.

        Call `settle` before.
        """
        ranking = self._ranking() if self.monitor is not None else []
        return manifest_if_complete(self._folder / step_name(ranking[0])) if ranking else None

    def due_step(self, step: int) -> bool:
        """Whether to save after optimizer step `step`, counted from 1."""
        every = self._settings.every_n_steps
        return self._settings.enabled and every is not None and step % every == 0

    def due_epoch(self, epoch: int) -> bool:
        """Whether to save at the end of `epoch`, counted from 0."""
        every = self._settings.every_n_epochs
        return self._settings.enabled and every is not None and (epoch + 1) % every == 0

    def due_time(self) -> bool:
        """Whether to save because the last save was so long ago; by the writer's clock, never on the others."""
        every = self._settings.every_n_minutes
        if not self._settings.enabled or not self._is_writer or every is None:
            return False
        return time.monotonic() - self._saved_s >= every * 60.0

    def save(
        self,
        state: Mapping[str, Any],
        *,
        step: int,
        epoch: int,
        metrics: Mapping[str, float] | None,
        late: Collection[Tensor] = (),
    ) -> None:
        """Begin to write a checkpoint; then `last` and `best` move, and those not to be kept are deleted.

        state: `model`, `training`, `generators` (see format.py), of which only the writer's is used; where ranks write
        together `sharded` in place of `model`: tensors by name, spread or the same on every rank. late: tensors in it
        that nothing changes before `before_update` is called; the others are copied now. metrics: of an evaluation of
        just these weights, None without one; only such a checkpoint can become `best`. Kept are the save_last_k
        newest ones, the save_top_k best ones (all with -1) and what any symlink in the folder names.

        Every rank must call it. Waits for the save before. Raises ConfigError on every rank where the monitor isn't
        among the metrics; CheckpointError on the writer where the state holds what can't be saved, and what another
        fault of the save before was. A disk that refuses is told to `warn` and by `settle`. Does nothing where
        checkpoints are not enabled.
        """
        if not self._settings.enabled:
            return
        self._check_monitor(metrics)
        if not self._is_writer and self._together is None:
            return
        self._wait()
        state, shards = self._own_part(state)
        self._saved_s = time.monotonic()
        save = _Save(step, epoch, dict(metrics or {}), shards)
        if not self._settings.asynchronous:
            self._write(state, save)
            return
        if self._copies_at_once:
            late = ()
        snapshot = take(state, late=late, buffers=self._buffers)
        snapshot.begin(self._thread)
        self._copying = snapshot, save
        if not late:
            self.before_update()

    def before_update(self) -> None:
        """To be called before anything changes the tensors that `save` was told are late. Every rank may call it.

        Only then is it known that nothing has changed them while they were copied, and writing begins.
        """
        if self._marks:
            self._check_marks()
        if self._copying is None:
            return
        (snapshot, save), self._copying = self._copying, None
        changed = snapshot.finish()
        fault = None
        if changed is not None:
            self._copies_at_once = True
            fault = f"The checkpoint of step {save.step} was given up: {changed} changed while it was copied."
            self._warn(
                f"{fault}\nOnly the optimizer's step should change it. From the next checkpoint on everything is "
                "copied before training goes on."
            )
        if fault is None or self._together is not None:  # the others have to hear of it
            self._writing = self._thread.submit(self._write_copy, snapshot, save, fault)
        else:
            self._failure = fault

    def watch(self, late: Collection[Tensor]) -> None:
        """Look whether anything but the optimizer's step changes `late` in the first step from here on; every rank.

        Where it does, all is copied before training goes on. What torch doesn't count as a change, as through `.data`,
        is seen here only.
        """
        if self._settings.enabled and self._settings.asynchronous and (self._is_writer or self._together is not None):
            self._watched, self._marks = list(late), fingerprints(late)

    def go_on_from(self, step: int, *, damaged: Collection[int] = ()) -> None:
        """Training goes on from the checkpoint of `step`: what it is the best of are those up to there that are whole.

        Later ones are deleted with the next save, unless all are kept; damaged ones aren't.
        """
        self._scores = {at: score for at, score in self._scores.items() if at not in damaged}
        self._given_up = {at for at in self._scores if at > step}
        self._scores = {at: score for at, score in self._scores.items() if at <= step}
        if self._is_writer and self._settings.enabled:
            self._move_best()
            if not self._ranking():
                (self._folder / BEST).unlink(missing_ok=True)  # of training that was given up

    def settle(self) -> str | None:
        """Wait until nothing is being written; why the last save failed and what the last good checkpoint is.

        None where it didn't fail, and on other ranks. Raises what isn't the disk's fault.
        """
        self._wait()
        if self._failure is None:
            return None
        last = self._folder / LAST
        good = f"The last good checkpoint is {last.resolve().name}." if last.exists() else "There is no checkpoint."
        return f"{self._failure}\n{good}"

    def abandon(self) -> None:
        """Begin nothing that all ranks do together: for one that fails, to which the others may not come."""
        if self._together is not None and self._copying is not None:
            self._copying[0].finish()
            self._copying = None

    def close(self) -> None:
        """Have what was begun written, and end the thread. Raises nothing of that: who needs it calls `settle`."""
        self.before_update()
        self._thread.shutdown(wait=True)

    def _check_marks(self) -> None:
        if fingerprints(self._watched) != self._marks:
            self._copies_at_once = True
        self._watched, self._marks = [], []

    def _wait(self) -> None:
        self.before_update()
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _own_part(self, state: Mapping[str, Any]) -> tuple[Mapping[str, Any], Shards | None]:
        """What this rank writes of a state; and, of what is spread over ranks, where its parts belong."""
        if self._together is None:
            check_state(state)
            return state, None
        from framework.checkpoint.sharded import shards_of  # what it needs of torch takes a second to import

        shards = shards_of(state[_SHARDED], is_first=self._is_writer or self._together.holds_own)
        rest: dict[str, Any] = {}
        if self._is_writer:
            rest = {part: value for part, value in state.items() if part != _SHARDED}
            check_state(rest)
        return {**rest, _SHARDED: dict(shards.tensors)}, shards

    def _write_copy(self, snapshot: Snapshot, save: _Save, fault: str | None) -> None:
        """In the thread."""
        snapshot.wait_for_devices()
        self._write(snapshot.state, save, fault=fault)

    def _write(self, state: Mapping[str, Any], save: _Save, *, fault: str | None = None) -> None:
        """fault: why this rank has nothing to write together with the others."""
        try:
            if self._together is None or save.shards is None:
                self._require_room(save, bytes_of(state))
                self._install(state, save)
            else:
                rest = dict(state)
                shards = save.shards.of_copies(rest.pop(_SHARDED))
                install = partial(self._install, rest, save) if self._is_writer else None
                require_room = partial(self._require_room, save)
                self._together.write(shards, install, fault=fault, require_room=require_room)
            self._failure = None
        except DiskError as error:
            self._failure = str(error)
            if self._is_writer:
                self._warn(f"{error}\nTraining goes on without it.")

    def _require_room(self, save: _Save, needed_bytes: int) -> None:
        with disk_errors(f"The checkpoint of step {save.step} can't be written to {self._folder}"):
            require_room(self._folder, needed_bytes)

    def _install(self, state: Mapping[str, Any], save: _Save, write_shards: WriteShards | None = None) -> None:
        """The writer's part, after which the checkpoint is there."""
        write(
            self._folder,
            state,
            step=save.step,
            epoch=save.epoch,
            metrics=save.metrics,
            config_text=self._config_text,
            write_shards=write_shards,
        )
        self._scores[save.step] = self._score(save.metrics)
        point(self._folder, LAST, step=save.step)
        # The checkpoint is saved; what fails from here on costs order and space.
        self._given_up.discard(save.step)
        self._move_best()
        for step in self._others(save.step):
            try:
                remove(self._folder / step_name(step))
            except DiskError as error:
                self._warn(str(error))
            self._scores.pop(step, None)
            self._given_up.discard(step)

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
        if self._settings.save_top_k == 0 or not ranking:
            return
        try:
            point(self._folder, BEST, step=ranking[0])
        except DiskError as error:
            self._warn(str(error))

    def _others(self, last: int) -> list[int]:
        """The steps not to be kept, once `last` is saved."""
        if self._settings.save_top_k == -1:
            return []
        newest = sorted(step for step in self._scores if step <= last)[-self._settings.save_last_k :]
        kept = {*self._ranking()[: self._settings.save_top_k], *newest} | self._named_by_symlinks()
        return sorted((self._scores.keys() | self._given_up) - kept)

    def _named_by_symlinks(self) -> set[int]:
        links = [path for path in self._folder.iterdir() if path.is_symlink()]
        steps = {step_of(link.readlink().name) for link in links}
        return {step for step in steps if step is not None}
