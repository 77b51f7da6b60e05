"""Base of the loggers that call a tracker's library: a worker thread, and a journal to resume from."""

from __future__ import annotations

import math
import queue
import re
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal, final, get_args

from framework.config.written import load_written_config
from framework.errors import ConfigError, describe_error
from framework.loggers.encoding import with_png
from framework.loggers.jsonl import JsonLines
from framework.loggers.media import array_of, counts_of, file_stem, images_of, split
from framework.media import Artifact, Histogram, Image, Media, Table, Text
from framework.system.files import open_regular
from framework.system.json_lines import read_lines
from framework.system.rank_log import warn, warn_of_disk
from framework.system.run_dir import RunDir, make_folders
from framework.types import FitInfo, Logger

Row = Mapping[str, Any]
"""A line of the journal: `step`, `kind`, and what the kind has."""

Checkpoints = Literal["best", "all"]
_JOURNAL = "journal.jsonl"
_NUMBER = (int, float)
# Calls that may wait for the library.
_CAPACITY = 1000

# What the rows of each kind have besides step and time.
_CONTENT: Mapping[str, Mapping[str, Any]] = {
    "numbers": {"values": dict, "epoch": int},
    "text": {"tag": str, "text": str},
    "images": {"tag": str, "files": list, "captions": list},
    "histogram": {"tag": str, "counts": list, "edges": list},
    "table": {"tag": str, "columns": list, "rows": list},
    "artifact": {"tag": str, "path": str},
}
# Which of these are numbers, on which the tracker's library computes.
_NUMERIC: Mapping[str, Sequence[str]] = {"numbers": ["values"], "histogram": ["counts", "edges"]}


@final
class Worker:
    """Makes calls one after another on a thread. Nothing here raises, and only `close` waits."""

    def __init__(self, name: str, *, root: Path) -> None:
        """Start the thread. root: the run directory; if it is gone, what the calls raise isn't reported."""
        self._name = name
        self._root = root
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._is_off = False
        self._has_dropped = False
        # A daemon: the process ends without a thread that hangs.
        self._thread = threading.Thread(target=self._run, name=f"logger.{name}", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], object]) -> None:
        """Queue a call; drop it if too many are waiting or one has raised."""
        if self._is_off:
            return
        if self._queue.qsize() < _CAPACITY:
            self._queue.put(call)
        elif not self._has_dropped:
            self._has_dropped = True
            warn(
                f"logger.{self._name} is slower than the training: {_CAPACITY} calls wait, and further ones are "
                "dropped. Raise trainer.log_every_n_steps."
            )

    def close(self, *, timeout_s: float) -> bool:
        """Wait until all calls are made. Return False, after a warning, if that takes too long."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            return True
        self._is_off = True
        warn(f"logger.{self._name} isn't done after {timeout_s:g} s; the run ends without it.")
        return False

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            if self._is_off:
                continue
            try:
                call()
            except BaseException as error:  # a library may call sys.exit, too
                if not self._is_off:
                    text = " ".join(str(error).split()).rstrip(".")
                    warn_of_disk(
                        f"logger.{self._name} is off: {type(error).__name__}: {text}. Training continues without it.",
                        root=self._root,
                    )
                self._is_off = True


class Tracker(Logger, ABC):
    """Base of loggers that call a tracker's library, on a worker thread.

    Everything logged is first written to a journal in the run directory (images as PNG files), then queued for the
    thread. A resumed run truncates the journal to the step it resumes from and sends the tracker what is missing. Its
    curve then has each step once, even if a killed process lost what the library hadn't sent.

    If the library raises, that is reported once and the logger is off. If it hangs, training continues, and the end of
    the run waits for it at most `close_timeout_s`.

    Subclasses implement the methods from `begin` on, which run on the thread in the order of the calls.
    """

    name: ClassVar[str]

    def __init__(self, run_dir: RunDir, *, log_checkpoints: str | None, close_timeout_s: float) -> None:
        if log_checkpoints not in (None, *get_args(Checkpoints)):
            raise ConfigError(f"logger.{self.name}.log_checkpoints={log_checkpoints}: must be best, all or null.")
        self.run_dir = run_dir
        self.config: Mapping[str, Any] = load_written_config(run_dir)
        self._log_checkpoints = log_checkpoints
        self._close_timeout_s = close_timeout_s
        self._folder = run_dir.path / "trackers" / self.name
        self._journal: JsonLines | None = None
        self._worker: Worker | None = None
        self._step = 0
        self._has_warned_of_disk = False

    # What the run logs

    def start(self, info: FitInfo) -> None:
        """Truncate the journal to the step that is resumed, and start the thread."""
        self._step = info.start_step
        if self._journal is None:
            self._journal = self._open_journal(last_step=info.start_step)
        else:
            self._journal.remove_after(info.start_step)
        self._start_worker()

    def log(self, values: Mapping[str, float | Media], *, step: int, epoch: int) -> None:
        numbers, media = split(values)
        if numbers:
            self._step = step
            plain = {name: _to_plain(value) for name, value in numbers.items()}
            self._add_row("numbers", step=step, values=plain, epoch=epoch)
        for tag, value in media.items():
            self._log_medium(tag, value, step=step)

    def on_results(self, metrics: Mapping[str, float]) -> None:
        if self._worker is None:
            return
        final = dict(metrics)
        self._worker.submit(lambda: self.write_final(final))
        for folder, names in self._checkpoints():
            self._worker.submit(partial(self.write_checkpoint, folder, names))

    def flush(self) -> None:
        """Write the journal; the library isn't waited for."""
        if self._journal is not None:
            self._journal.flush()

    def close(self) -> None:
        """Wait for the library until the deadline; calling it again is fine."""
        self._close_journal()
        worker = self._worker
        self._worker = None
        if worker is None:
            return
        # The engine closes loggers while it handles the error that ends the run, if there is one.
        has_failed = sys.exc_info()[1] is not None
        worker.submit(lambda: self.finish(has_failed=has_failed))
        if not worker.close(timeout_s=self._close_timeout_s):
            self.abandon()

    # The journal

    def _start_worker(self) -> None:
        if self._worker is not None:
            return
        earlier = self._earlier_rows()
        self._worker = Worker(self.name, root=self.run_dir.path)
        self._worker.submit(self.begin)
        self._worker.submit(lambda: self.write_earlier([_from_plain(row) for row in earlier]))

    def _earlier_rows(self) -> list[dict[str, Any]]:
        """Return the journal's rows of an earlier process; none if it can't be read, which has been reported."""
        try:
            lines = list(read_lines(self._folder / _JOURNAL, check=self._fault))
        except OSError:
            return []
        # A full disk may keep later rows in the file.
        return [line.row for line in lines if line.row is not None and line.row["step"] <= self._step]

    def _open_journal(self, *, last_step: int | None) -> JsonLines:
        return JsonLines(self._folder / _JOURNAL, root=self.run_dir.path, last_step=last_step, check=self._fault)

    def _close_journal(self) -> None:
        if self._journal is not None:
            self._journal.close()

    def _fault(self, row: Row) -> str | None:
        """Return what is wrong with a row of the journal, on which the tracker's library would fail; else None."""
        kind = str(row.get("kind"))
        if kind not in _CONTENT:
            return "its kind is damaged"
        for name, type_ in {"time": _NUMBER, **_CONTENT[kind]}.items():
            if not isinstance(row.get(name), type_):
                return f"its {name} is damaged"
        try:
            plain = _from_plain(row)
        except (TypeError, ValueError):
            return "a number is damaged"

        for name in _NUMERIC.get(kind, ()):
            values = plain[name]
            numbers = values.values() if isinstance(values, dict) else values
            if not all(isinstance(number, _NUMBER) for number in numbers):
                return f"its {name} aren't numbers"

        if kind == "images":
            if len(row["files"]) != len(row["captions"]):
                return "its captions are damaged"
            for name in row["files"]:
                fault = _picture_fault(self._folder, name)
                if fault is not None:
                    return f"{name} {fault}"
        return None

    def _add_row(self, kind: str, *, step: int, once_written: Sequence[Future[bool]] = (), **content: Any) -> None:
        """Write a row to the journal and queue it for the tracker.

        once_written: the tracker gets it once these are done, if all are True.
        """
        row = {"step": step, "time": round(time.time(), 3), "kind": kind, **content}
        if self._journal is None:
            # Before training starts, or in a job that doesn't train.
            self._journal = self._open_journal(last_step=None)
        self._journal.write(row)
        if self._worker is not None:
            self._worker.submit(lambda: self._write_complete(row, once_written))

    def _write_complete(self, row: Row, once_written: Sequence[Future[bool]]) -> None:
        if all(written.result() for written in once_written):
            self.write(_from_plain(row))

    def _log_medium(self, tag: str, value: Media, *, step: int) -> None:
        if isinstance(value, Text):
            # The tracker has the configuration as that of its run.
            if tag != "config":
                self._add_row("text", step=step, tag=tag, text=value.text)
        elif isinstance(value, Table):
            rows = [[_to_plain(cell) for cell in row] for row in value.rows]
            self._add_row("table", step=step, tag=tag, columns=list(value.columns), rows=rows)
        elif isinstance(value, Artifact):
            self._add_row("artifact", step=step, tag=tag, path=str(Path(value.path).absolute()))
        elif isinstance(value, Histogram):
            if array_of(value.values).size:
                counts, edges = counts_of(value.values)
                self._add_row("histogram", step=step, tag=tag, counts=counts, edges=edges)
        else:
            self._log_images(tag, images_of(value), step=step)

    def _log_images(self, tag: str, images: Sequence[Image], *, step: int) -> None:
        files = []
        written = []
        for number, image in enumerate(images):
            file = self._folder / "images" / f"{_file_name(tag)}_{step:08}_{number}.png"
            files.append(str(file.relative_to(self._folder)))
            written.append(with_png(image, partial(self._write_png, file)))
        captions = [image.caption for image in images]
        self._add_row("images", step=step, once_written=written, tag=tag, files=files, captions=captions)

    def _write_png(self, file: Path, png: bytes) -> bool:
        """Write the file, and return True if the disk has taken it."""
        try:
            make_folders(file.parent, root=self.run_dir.path)
            file.write_bytes(png)
        except OSError as error:
            if not self._has_warned_of_disk:
                text = f"{self._folder} can't be written: {error.strerror or error}. Images are left out"
                warn_of_disk(text, root=self.run_dir.path)
            self._has_warned_of_disk = True
            return False
        return True

    def _checkpoints(self) -> list[tuple[Path, list[str]]]:
        """Return the checkpoints to upload, and which of `last` and `best` point to each."""
        folder = self.run_dir.checkpoints
        pointers: dict[Path, list[str]] = defaultdict(list)
        for pointer in ("last", "best"):
            if (folder / pointer).exists():
                pointers[(folder / pointer).resolve()].append(pointer)

        if self._log_checkpoints == "all":
            return [(path, pointers.get(path, [])) for path in sorted(folder.resolve().glob("step_*"))]
        if self._log_checkpoints is None or not pointers:
            return []
        # Without a metric that ranks them, only `last` is there.
        wanted = "best" if (folder / "best").exists() else "last"
        path = (folder / wanted).resolve()
        return [(path, pointers[path])]

    # On the thread

    @abstractmethod
    def begin(self) -> None:
        """Create the tracker's run, or continue the one that `identity` names."""

    def write_earlier(self, rows: Sequence[Row]) -> None:
        """Write those rows of an earlier process that the tracker doesn't have; by default, all of them."""
        for row in rows:
            self.write(row)

    def write(self, row: Row) -> None:
        """Write a row by the method for its kind: `write_numbers` for `numbers`."""
        getattr(self, f"write_{row['kind']}")(row)

    @abstractmethod
    def write_numbers(self, row: Row) -> None:
        """Write `values`, name → float."""

    @abstractmethod
    def write_text(self, row: Row) -> None:
        """Write `text` as `tag`."""

    @abstractmethod
    def write_images(self, row: Row) -> None:
        """Write the PNG `files`, which `file_of` finds, with their `captions`, as `tag`."""

    @abstractmethod
    def write_histogram(self, row: Row) -> None:
        """Write `counts` between `edges` as `tag`."""

    @abstractmethod
    def write_table(self, row: Row) -> None:
        """Write `rows` under `columns` as `tag`."""

    @abstractmethod
    def write_artifact(self, row: Row) -> None:
        """Keep the file or folder `path` as `tag`."""

    @abstractmethod
    def write_final(self, metrics: Mapping[str, float]) -> None:
        """Write the final metrics."""

    @abstractmethod
    def write_checkpoint(self, folder: Path, names: Sequence[str]) -> None:
        """Keep a checkpoint. names: `best` and `last`, if these point to it."""

    @abstractmethod
    def finish(self, *, has_failed: bool) -> None:
        """End the tracker's run."""

    def abandon(self) -> None:
        """Let the process exit although the library hangs. Called on the main thread."""
        return

    # For subclasses

    def file_of(self, name: str) -> Path:
        """Return the path of one of the `files` of a row."""
        return self._folder / name

    @property
    def identity(self) -> dict[str, Any]:
        """What `run.json` has to find the tracker's run again; empty for a new one."""
        trackers = self.run_dir.read_run().get("trackers", {})
        facts: dict[str, Any] = trackers.get(self.name, {})
        return facts

    @identity.setter
    def identity(self, facts: Mapping[str, Any]) -> None:
        self.run_dir.record_tracker(self.name, facts)

    @property
    def sweep(self) -> str | None:
        """The name of the sweep that the run belongs to."""
        parent = self.run_dir.path.parent
        return parent.name if parent.parent.name == "multirun" else None

    @property
    def run_name(self) -> str:
        """The run directory's name, after that of its sweep."""
        name = self.run_dir.path.name
        return name if self.sweep is None else f"{self.sweep}/{name}"

    @property
    def tags(self) -> list[str]:
        """The configuration's `tags`."""
        return list(self.config.get("tags") or [])


def check_installed(library: str) -> None:
    """Raise ConfigError unless the library of this tracker is installed."""
    spec = find_spec(library)
    # Without an origin, it is a folder of that name, which W&B itself makes.
    if spec is None or spec.origin is None:
        raise ConfigError(f"{library} isn't installed. To log to it: pip install 'framework[{library}]'")


def _picture_fault(folder: Path, name: Any) -> str | None:
    """Return what is wrong with an image's file, to follow its name."""
    from PIL import Image as Picture

    path = folder / str(name)
    if not path.resolve().is_relative_to(folder.resolve()):
        return "is outside of the journal's folder"
    try:
        with open_regular(path) as file, Picture.open(file) as picture:
            # Checks the checksums and decodes nothing.
            picture.verify()
    except Exception as error:  # the disk's, or Pillow's, of many classes
        return f"can't be read ({describe_error(error)})"
    return None


def _file_name(tag: str) -> str:
    return re.sub(r"[^\w.~-]", "_", file_stem(tag))


def _to_plain(value: Any) -> Any:
    """Return a value that JSON can hold; it has no NaN."""
    if value is None or isinstance(value, (str, int)):
        return value
    if math.isfinite(value):
        return float(value)
    return {"float": str(float(value))}


def _from_plain(value: Any) -> Any:
    """Return a value of the journal with the numbers that aren't finite."""
    if isinstance(value, list):
        return [_from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"float"}:
        return float(value["float"])
    return {key: _from_plain(item) for key, item in value.items()}
