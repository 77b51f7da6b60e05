"""The run directory: made exclusively by one process, laid out the same for every run."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from framework.errors import RequestError

_ATTEMPTS = 100
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EINVAL)  # of file systems that have none


@dataclass(frozen=True)
class RunDir:
    """Paths inside one run's directory. Making the value touches no disk; `create` does."""

    path: Path

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def overrides_file(self) -> Path:
        return self.path / "overrides.yaml"

    @property
    def before_file(self) -> Path:
        """Configuration and overrides from before a resumption that isn't known to work yet; else not there."""
        return self.path / "before_resume.yaml"

    @property
    def lock_file(self) -> Path:
        return self.path / ".lock"

    @property
    def run_file(self) -> Path:
        return self.path / "run.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def failure_file(self) -> Path:
        return self.path / "failure.json"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank_{rank}.log"

    def read_run(self) -> dict[str, Any]:
        """What `run.json` says; raises `OSError` or `ValueError` where it isn't there or isn't JSON."""
        content: dict[str, Any] = json.loads(self.run_file.read_text())
        return content

    def update_run(self, facts: Mapping[str, Any]) -> None:
        """Add to `run.json`. One process at a time: the parent before and after the ranks, rank 0 in between."""
        known = self.read_run() if self.run_file.exists() else {}
        write_atomically(self.run_file, json.dumps({**known, **facts}, indent=2) + "\n")


def create_run_dir(parent: Path, *, name: str | None = None) -> RunDir:
    """Make `parent/<date>_<time>_<4 hex>`, or `parent/name`, and its sub-folders; no other process can get the same.

    Raises RequestError where the place can't be written, or `name` is taken.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        path = _make_exclusive(parent) if name is None else parent / name
        if name is not None:
            path.mkdir()
        run_dir = RunDir(path.resolve())
        run_dir.logs.mkdir()
        run_dir.checkpoints.mkdir()
    except OSError as error:
        raise RequestError(
            f"The run directory can't be made under {parent}: {error.strerror or error}.\n"
            f"Choose a folder that can be written with path.outputs=FOLDER."
        ) from error
    return run_dir


@contextmanager
def locked(run_dir: RunDir) -> Iterator[None]:
    """Keep other processes out of the run directory while this is entered; the kernel ends it with the process.

    A file system without locks (some network ones) isn't guarded. Raises RequestError where another process is in it,
    or the file of the lock can't be written.
    """
    try:
        lock = os.open(run_dir.lock_file, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise RequestError(f"The run directory {run_dir.path} can't be written: {error.strerror or error}.") from error
    try:
        _lock(lock, run_dir)
        with suppress(OSError):  # on a full disk the others aren't told who has it
            os.ftruncate(lock, 0)
            os.write(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield
    finally:
        os.close(lock)


def _lock(lock: int, run_dir: RunDir) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = run_dir.lock_file.read_text().strip() or "another process"
        raise RequestError(
            f"The run {run_dir.path} is in use by {holder}.\n"
            "Two commands can't train in one directory: wait until that one has ended, or end it."
        ) from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def new_name() -> str:
    """A name that sorts by time and that nothing else started in the same second has, but for one case in 65,536."""
    return f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{secrets.token_hex(2)}"


def _make_exclusive(parent: Path) -> Path:
    for _ in range(_ATTEMPTS):
        path = parent / new_name()
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise FileExistsError(f"{_ATTEMPTS} names under {parent} were all taken")


def write_atomically(path: Path, text: str) -> None:
    """Write a small file so that a reader sees the old or the new content, never a part, also after a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
