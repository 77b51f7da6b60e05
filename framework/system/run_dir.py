"""The run directory: created and locked by one process, with the same layout for every run. No torch."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from framework.errors import RequestError
from framework.system.files import FileFacts, open_regular, read_bytes, read_json
from framework.system.formatting import display_path

# To find a name that no other run has.
_ATTEMPTS = 100

_KINDS: Mapping[str, type] = {
    "earlier": list,
    "restarts": list,
    "segments": list,
    "skipped": list,
    "spikes": list,
    "abandoned": dict,
    "results": dict,
    "trackers": dict,
    "files": dict,
    "config": str,
}
"""The types of the optional entries of `run.json` that a resumed run reads."""

# Trackers note their ids in run.json from threads.
_updating = threading.Lock()


@dataclass(unsafe_hash=True)
class RunDir:
    """The paths inside one run's directory."""

    path: Path

    def __post_init__(self) -> None:
        path = self.path
        self.config_file = path / "config.yaml"
        self.overrides_file = path / "overrides.yaml"
        # The values that config.yaml shows masked; only the owner can read it.
        self.secrets_file = path / "secrets.yaml"
        # What `locked` locks. A file left by a killed run isn't locked: the next run takes it.
        self.lock_file = path / ".lock"
        self.run_file = path / "run.json"
        self.metrics_file = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        # Tables, images and texts, as NAME_STEP.csv, .png, .txt or .md; `/` in a name is written `__`.
        self.media = path / "media"
        self.logs = path / "logs"

    @property
    def tensorboard(self) -> Path:
        """Return the folder of TensorBoard's event files: the run directory, since TensorBoard names runs by folders.

        Earlier versions had a folder of its own below, in which their runs continue.
        """
        earlier = self.path / "tensorboard"
        return earlier if earlier.is_dir() else self.path

    @property
    def event_files(self) -> list[Path]:
        """Return TensorBoard's event files."""
        return list(self.tensorboard.glob("events.out.tfevents.*"))

    def failure_of(self, *, node: int, attempt: int, is_last: bool) -> Path:
        """Return the report of a failure: node 0's, or that of a node cut off from it. is_last: no restart follows."""
        name = "failure"
        if node > 0:
            name += f"_node{node}"
        if not is_last:
            name += f"_attempt_{attempt}"
        return self.path / f"{name}.json"

    def objects_file(self, number: int | str) -> Path:
        """Return the file of the Python objects that a call of `framework.train` gave; each resume may add one."""
        return self.path / f"objects_{number}.pkl"

    def rank_log(self, rank: int) -> Path:
        """Return the log of one rank."""
        return self.logs / f"rank_{rank}.log"

    def collectives_of(self, *, attempt: int) -> Path:
        """Return the path of the ranks' dumps of their collectives, without the number of the rank."""
        return self.logs / f"collectives_attempt_{attempt}_rank_"

    def read_run(self) -> dict[str, Any]:
        """Return the content of `run.json`. Raises FileNotFoundError without one, RequestError if it is damaged."""
        try:
            content = read_json(self.run_file)
            if not isinstance(content, dict):
                raise ValueError("it isn't a JSON object")
            for name, kind in _KINDS.items():
                if content.get(name) is not None and not isinstance(content[name], kind):
                    raise ValueError(f"its {name} is no {kind.__name__}")
        except FileNotFoundError:
            raise
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise RequestError(
                f"{self.run_file} can't be read: {reason}.\nRestore it from a copy. If there is none, remove it: the "
                "run is resumed without its history, and without comparing its files with what it wrote."
            ) from error
        return content

    def update_run(self, facts: Mapping[str, Any]) -> None:
        """Add to `run.json`. One process at a time may: the parent before and after the ranks, rank 0 in between."""
        with _updating:
            record = self.read_run() if self.run_file.exists() else {}
            write_object(self.run_file, record | dict(facts))

    def recorded_facts(self, name: str) -> FileFacts | None:
        """Return the size and checksum of a file of the run in `run.json`; None if earlier versions didn't record them.

        Raises RequestError if `run.json` is damaged.
        """
        try:
            facts = self.read_run().get("files", {}).get(name)
        except FileNotFoundError:
            return None
        if facts is None:
            return None
        try:
            return FileFacts(size_bytes=int(facts["size_bytes"]), crc32=str(facts["crc32"]))
        except (KeyError, TypeError, ValueError) as error:
            raise RequestError(
                f"{self.run_file} is damaged: files.{name} is {facts}. Restore it from a copy."
            ) from error

    def read_unchanged(self, path: Path) -> bytes:
        """Return the content of one of the run's files. Raises RequestError if it isn't what the run wrote."""
        facts = self.recorded_facts(path.name)
        try:
            if facts is None:
                with open_regular(path) as file:
                    return file.read()
            content = read_bytes(path, max_bytes=facts.size_bytes)
            if FileFacts.of(content) == facts:
                return content
            reason = f"{self.run_file.name} has another size or checksum for it"
        except OSError as error:
            reason = f"it can't be read ({error.strerror or error})"
        raise RequestError(f"{path} isn't what the run wrote: {reason}.\nRestore it from a copy, or start a new run.")

    def record_tracker(self, name: str, facts: Mapping[str, Any]) -> None:
        """Note in `run.json` what identifies the run in a tracker, to continue it there. As `update_run`."""
        with _updating:
            record = self.read_run()
            trackers = record.get("trackers", {})
            record["trackers"] = trackers | {name: dict(facts)}
            write_object(self.run_file, record)


def make_folders(folder: Path, *, root: Path) -> None:
    """Make a folder below `root`, and the folders between them, if they are missing.

    Raises FileNotFoundError if `root` is: a run directory that was moved away must not be made again, half empty.
    """
    between = [place for place in folder.parents if root in place.parents]
    for place in (*reversed(between), folder):
        place.mkdir(exist_ok=True)


@contextmanager
def new_run_dir(parent: Path, *, name: str | None = None) -> Iterator[RunDir]:
    """Create a run directory. If the block raises RequestError, remove it and the parents created for it."""
    missing = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    run_dir = None
    try:
        run_dir = create_run_dir(parent, name=name)
        yield run_dir
    except RequestError:
        if run_dir is not None:
            shutil.rmtree(run_dir.path, ignore_errors=True)
        for folder in missing:
            # Another run may be in it by now.
            with suppress(OSError):
                folder.rmdir()
        raise


def create_run_dir(parent: Path, *, name: str | None = None) -> RunDir:
    """Create `parent/<date>_<time>_<4 hex>`, or `parent/name`, for this process alone.

    Raises RequestError if `parent` can't be written, or `name` exists.
    """
    try:
        for _ in range(_ATTEMPTS):
            path = parent / (name or new_name())
            with suppress(FileExistsError):
                path.mkdir(parents=True)
                return RunDir(path.resolve())
        raise FileExistsError(errno.EEXIST, f"{path.name} exists already")
    except OSError as error:
        raise RequestError(
            f"The run directory can't be created under {display_path(parent)}: {error.strerror or error}.\n"
            "Choose a writable folder with path.outputs=FOLDER."
        ) from error


def check_no_way_out(run_dir: RunDir) -> None:
    """Raise RequestError if a symlink in a run directory leads out of it: the run might write to its target.

    Symlinks to checkpoints, and those that W&B makes in its folder, are never written to.
    """
    root = run_dir.path.resolve()
    # `os.walk` doesn't follow symlinks.
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            place = Path(folder, name)
            # Unlike `Path.resolve` before Python 3.13, this raises nothing for a loop of symlinks.
            if place.is_symlink() and not Path(os.path.realpath(place)).is_relative_to(root):
                raise RequestError(
                    f"{place} is a symlink to {place.readlink()}, outside of the run, and might be written to.\n"
                    "Remove it, or put what it points to in its place."
                )
        if Path(folder) == root:
            folders[:] = [name for name in folders if name not in ("checkpoints", "wandb")]


@contextmanager
def locked(run_dir: RunDir) -> Iterator[None]:
    """Keep other processes out of the run directory while this is entered. The kernel unlocks it if this one is killed.

    A file system without locks isn't guarded. Raises RequestError if another process is in it.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(run_dir.lock_file, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise RequestError(
            f"The run {run_dir.path} is in use by {_holder(run_dir)}.\n"
            "Two commands can't train in one directory: wait until that one has ended, or end it."
        ) from None
    except OSError:
        # This file system has no locks. A directory that can't be written is refused when the run is recorded.
        pass
    try:
        yield
    finally:
        if lock.is_locked:
            # Before the release, because after it the file may be another process's.
            run_dir.lock_file.unlink(missing_ok=True)
            lock.release()


def is_locked(run_dir: RunDir) -> bool:
    """Return True if a process is in `locked`; without taking the lock. True, too, on a file system without locks."""
    try:
        file = open_regular(run_dir.lock_file)
    # It is another user's, who may be running it.
    except PermissionError:
        return True
    except OSError:
        return False
    with file:
        try:
            # This lock is released when the file is closed.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def check_regular_files(run_dir: RunDir) -> None:
    """Raise RequestError for what a resumed run can't read or write, or would wait for without end.

    That is a FIFO, socket or device, a loop of symlinks, a file in place of a folder, and a folder in place of a log.
    """
    for place in (run_dir.checkpoints, run_dir.media, run_dir.logs):
        if os.path.lexists(place) and not place.is_dir():
            raise RequestError(f"{place} isn't a folder. Remove it to resume the run.")
    folders = [run_dir.path]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry))
                elif _is_loop(Path(entry)):
                    raise RequestError(f"{entry.path} is a symlink that leads back to itself. Remove it.")
                elif Path(entry).exists() and not entry.is_file() and not entry.is_dir():
                    raise RequestError(f"{entry.path} isn't a regular file. Remove it to resume the run.")
    for log in run_dir.logs.glob("rank_*.log"):
        if log.is_dir():
            raise RequestError(f"{log} is a folder. Remove it to resume the run.")


def _is_loop(path: Path) -> bool:
    try:
        path.stat()
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


def _holder(run_dir: RunDir) -> str:
    """Describe the process that runs it, by `run.json`."""
    record = read_object(run_dir.run_file)
    # There is no record if the run has only just begun.
    if record is None or record.get("status") != "running" or "process" not in record:
        return "another process"
    process = record["process"]
    return f"process {process['pid']} on {process['host']}"


def new_name() -> str:
    """Return a name that sorts by time; of two runs started in the same second, one in 65,536 has the other's."""
    return f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{secrets.token_hex(2)}"


def write_atomically(path: Path, text: str, *, is_private: bool = False) -> None:
    """Write a small file so that a reader sees the old or the new content, never a part, also after a power cut.

    A symlink at `path` is replaced, not followed. is_private: only the owner can read the file (mode 0600).
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    mode = 0o600 if is_private else 0o666
    try:
        with os.fdopen(os.open(temporary, flags, mode), "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_object(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file atomically."""
    write_atomically(path, json.dumps(content, indent=2) + "\n")


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the content of a JSON file; None if this machine doesn't see it, or it isn't a JSON object."""
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
