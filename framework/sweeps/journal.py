"""Optuna's journal of a search, `study.log`: its lock, and opening it as the study of one sweep. No torch here.

The journal is Optuna's own, one JSON object a line, and Optuna's tools read it. Three things are done for it here.

Its lock is that of the sweep's other files, `framework.sweeps.claims.exclusive`: unlike `flock` it holds on every
shared disk, and unlike Optuna's own, which costs 30 s after a kill, it is free at once when its process is gone.

A process that is killed while it writes leaves the start of a line, and a power cut may leave zeros in the last one.
What is appended to that is lost, and Optuna reads nothing any more, so it is cut off before anything is appended.

A journal says which sweep it belongs to.
"""

from __future__ import annotations

import json
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from framework.errors import ConfigError, describe_error
from framework.sweeps.claims import exclusive

if TYPE_CHECKING:
    from optuna.storages import JournalStorage
    from optuna.study import Study

_STUDY = "sweep"
"""The name of the study in every journal: Hyperband assigns trials to its brackets by it."""

_OWNER = "sweep"
"""The attribute of the study that identifies its sweep."""


@final
class JournalLock:
    """Keeps other processes and threads from writing to a journal; Optuna's `lock_obj`.

    Who has it can acquire it again, as Optuna does for each line within `with lock:`.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._folder = file.with_name(f".{file.name}.lock")
        self._thread_lock = threading.RLock()
        self._depth = 0
        self._entered = ExitStack()

    def acquire(self) -> bool:
        """Wait for the lock. Raises RunError if another process doesn't release it, DiskError if the disk refuses."""
        self._thread_lock.acquire()
        try:
            if self._depth == 0:
                self._entered.enter_context(exclusive(self._folder))
                _cut_torn_line(self._file)
        except BaseException:
            self._entered.close()
            self._thread_lock.release()
            raise
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1
        try:
            if self._depth == 0:
                self._entered.close()
        finally:
            self._thread_lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def _cut_torn_line(file: Path) -> None:
    """Remove what follows the last complete line. The lock is held, so that nobody is writing it."""
    try:
        journal = file.open("rb+")
    except FileNotFoundError:
        return
    with journal:
        if journal.seek(0, 2) == 0:
            return
        journal.seek(-1, 2)
        if journal.read() == b"\n":
            return
        journal.seek(0)
        num_bytes = journal.read().rfind(b"\n") + 1
        journal.truncate(num_bytes)


def _cut_damaged_line(file: Path) -> None:
    """Remove the last line if it isn't JSON, and those before it are. The lock is held."""
    if not file.exists():
        return
    *lines, last = file.read_bytes().splitlines(keepends=True) or [b""]
    if lines and _is_json(lines[-1]) and not _is_json(last):
        with file.open("rb+") as journal:
            journal.truncate(sum(map(len, lines)))


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def open_study(file: Path, *, lock: JournalLock, sweep: str, mode: str) -> Study:
    """Return the study in a sweep's journal; create both if they aren't there. Its sampler and pruner do nothing.

    Raises ConfigError if the journal is damaged, or another sweep's.

    Args:
        sweep: identifies the sweep.
        mode: `min` or `max`.
    """
    import optuna

    direction = optuna.study.StudyDirection.MINIMIZE
    if mode == "max":
        direction = optuna.study.StudyDirection.MAXIMIZE
    foreign = f"{file} belongs to another sweep. Put this sweep's own in its place, or none."
    with lock:
        _cut_damaged_line(file)
        storage = open_storage(file, lock=lock)
        names = optuna.get_all_study_names(storage)
        if names not in ([], [_STUDY]):
            raise ConfigError(foreign)
        if not names:
            optuna.create_study(storage=storage, study_name=_STUDY, direction=direction)
        study = optuna.load_study(
            storage=storage,
            study_name=_STUDY,
            sampler=optuna.samplers.RandomSampler(),
            pruner=optuna.pruners.NopPruner(),
        )
        # The process that created the study may have been killed before it wrote this.
        if not study.user_attrs and not study.get_trials(deepcopy=False):
            study.set_user_attr(_OWNER, sweep)
    if study.user_attrs.get(_OWNER) != sweep or study.direction != direction:
        raise ConfigError(foreign)
    return study


def open_storage(file: Path, *, lock: Any) -> JournalStorage:
    """Return what Optuna reads and writes a journal with. Raises ConfigError if it is none, or is damaged."""
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    try:
        return JournalStorage(JournalFileBackend(str(file), lock_obj=lock))
    # Optuna raises what comes up when it replays something else than its own lines.
    except (ValueError, LookupError, TypeError, AttributeError, AssertionError) as error:
        raise ConfigError(
            f"{file} can't be read as Optuna's journal ({describe_error(error)}). Restore it from a copy."
        ) from error
