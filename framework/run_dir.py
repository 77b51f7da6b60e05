"""The run directory: made exclusively by one process, laid out the same for every run."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from framework.errors import RequestError

_ATTEMPTS = 100
# Of file systems that have none, and of NFS, for a descriptor that can't be written to.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.EBADF)


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
        """There only while a run on a file system that can't lock directories is under way."""
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

    def failure_of(self, *, node: int, attempt: int, is_last: bool) -> Path:
        """Where a failure is reported by node 0, or by another node that is cut off from it; one that is restarted
        after has the number of its attempt in its name."""
        parts = ["failure", *([f"node{node}"] if node else []), *([] if is_last else [f"attempt_{attempt}"])]
        return self.path / f"{'_'.join(parts)}.json"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank_{rank}.log"

    def read_run(self) -> dict[str, Any]:
        """What `run.json` says; raises `OSError` or `ValueError` where it isn't there or isn't JSON."""
        content: dict[str, Any] = json.loads(self.run_file.read_text())
        return content

    def process_log(self, name: str, *, node: int) -> Path:
        """Of a process of a node's launcher that is no rank."""
        return self.logs / f"{name}_{node}.log"

    def update_run(self, facts: Mapping[str, Any]) -> None:
        """Add to `run.json`. One process at a time: the parent before and after the ranks, rank 0 in between."""
        known = self.read_run() if self.run_file.exists() else {}
        write_atomically(self.run_file, json.dumps({**known, **facts}, indent=2) + "\n")


@contextmanager
def new_run_dir(parent: Path, *, name: str | None = None) -> Iterator[RunDir]:
    """Create a run directory. If the block raises RequestError, remove it and the parents that were made for it."""
    missing = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    run_dir = None
    try:
        run_dir = create_run_dir(parent, name=name)
        yield run_dir
    except RequestError:
        if run_dir is not None:
            shutil.rmtree(run_dir.path, ignore_errors=True)
        for folder in missing:
            with suppress(OSError):  # another run is in it
                folder.rmdir()
        raise


def create_run_dir(parent: Path, *, name: str | None = None) -> RunDir:
    """Create `parent/<date>_<time>_<4 hex>`, or `parent/name`, for this process alone.

    Raises RequestError where the place can't be written, or `name` is taken.
    """
    try:
        path = _make_exclusive(parent) if name is None else parent / name
        if name is not None:
            path.mkdir(parents=True)
        run_dir = RunDir(path.resolve())
        try:
            run_dir.logs.mkdir()
        except OSError:
            path.rmdir()
            raise
    except OSError as error:
        raise RequestError(
            f"The run directory can't be made under {parent}: {error.strerror or error}.\n"
            f"Choose a folder that can be written with path.outputs=FOLDER."
        ) from error
    return run_dir


@contextmanager
def locked(run_dir: RunDir) -> Iterator[None]:
    """Keep other processes out of the run directory while this is entered; the kernel ends it with the process.

    The directory itself is locked; where that can't be (network file systems want what is locked to be writable), a
    file in it that is removed at the end. A file system without locks isn't guarded. Raises RequestError where another
    process is in it, or it can't be written.
    """
    if not os.access(run_dir.path, os.W_OK):
        raise RequestError(f"The run directory {run_dir.path} can't be written: {os.strerror(errno.EACCES)}.")
    lock = os.open(run_dir.path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if _take(lock, run_dir):
            yield
        else:
            with _locked_file(run_dir):
                yield
    finally:
        os.close(lock)


@contextmanager
def _locked_file(run_dir: RunDir) -> Iterator[None]:
    lock = _open_lock(run_dir)
    try:
        # Who had it may have removed the file meanwhile: then what was locked here is no longer what others find.
        while _take(lock, run_dir) and not _is_current(lock, run_dir):
            os.close(lock)
            lock = _open_lock(run_dir)
        try:
            yield
        finally:
            run_dir.lock_file.unlink(missing_ok=True)  # while it is held: nobody loses one of theirs
    finally:
        os.close(lock)


def _open_lock(run_dir: RunDir) -> int:
    try:
        return os.open(run_dir.lock_file, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise RequestError(f"The run directory {run_dir.path} can't be written: {error.strerror or error}.") from error


def _is_current(lock: int, run_dir: RunDir) -> bool:
    try:
        return os.path.samestat(os.fstat(lock), run_dir.lock_file.stat())
    except FileNotFoundError:
        return False


def _take(lock: int, run_dir: RunDir) -> bool:
    """Lock it; False where that is no way to lock it. Raises RequestError where another process has it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise RequestError(
            f"The run {run_dir.path} is in use by {_holder(run_dir)}.\n"
            "Two commands can't train in one directory: wait until that one has ended, or end it."
        ) from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def _holder(run_dir: RunDir) -> str:
    """Who says in `run.json` to be running it."""
    try:
        run = run_dir.read_run()
        process = run["process"] if run["status"] == "running" else None
    except (OSError, ValueError, KeyError):  # it has only just begun
        process = None
    return "another process" if process is None else f"process {process['pid']} on {process['host']}"


def new_name() -> str:
    """A name that sorts by time and that nothing else started in the same second has, but for one case in 65,536."""
    return f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{secrets.token_hex(2)}"


def _make_exclusive(parent: Path) -> Path:
    for _ in range(_ATTEMPTS):
        path = parent / new_name()
        try:
            path.mkdir(parents=True)
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


def read_object(path: Path) -> dict[str, Any] | None:
    """What a file of JSON holds; None where this machine doesn't see it, or it isn't JSON."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found
