"""metrics.jsonl, one JSON object per line; and the newest images and tables as files in `media`."""

from __future__ import annotations

import csv
import glob
import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, final

from framework.loggers.encoding import with_png
from framework.loggers.media import file_stem, images_of, split
from framework.media import Image, Media, Table
from framework.system.json_lines import Check, metrics_fault, read_lines
from framework.system.rank_log import warn, warn_of_disk
from framework.system.run_dir import RunDir, make_folders, write_atomically
from framework.types import FitInfo, Logger

_DAMAGED_SHOWN = 5

# Made once: `json.dumps` makes one at each call.
_encode = json.JSONEncoder(allow_nan=False).encode


@final
class JsonlLogger(Logger):
    """Append a line for each `log` of numbers: {"step", "epoch", "time" (Unix seconds), and every value by its name}.

    A value that is not finite is null, and `nonfinite` says what it was: {"train/loss": null, "nonfinite":
    {"train/loss": "nan"}}. A resumed run drops the lines after the step it resumes from. A full disk does not end
    training (see `JsonLines`).

    Images and tables go to `media/NAME_STEP.png` and `.csv`, with `/` in the name written `__`; only the newest
    of a name is kept. `job=report` shows them.
    """

    def __init__(self, *, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._path = run_dir.metrics_file
        self._media = run_dir.media
        self._file: JsonLines | None = None

    def start(self, info: FitInfo) -> None:
        if self._file is None:
            self._file = self._open(last_step=info.start_step)
        else:
            self._file.remove_after(info.start_step)

    def log(self, values: Mapping[str, float | Media], *, step: int, epoch: int) -> None:
        numbers, media = split(values)
        if numbers:
            self._write_numbers(numbers, step=step, epoch=epoch)
        for name, value in media.items():
            if isinstance(value, Table):
                self._write_medium(name, ".csv", partial(_save_table, value), step=step)
            else:
                self._write_images(name, images_of(value), step=step)

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _open(self, *, last_step: int | None) -> JsonLines:
        return JsonLines(self._path, root=self._run_dir.path, last_step=last_step, check=metrics_fault)

    def _write_numbers(self, numbers: Mapping[str, float], *, step: int, epoch: int) -> None:
        if self._file is None:
            self._file = self._open(last_step=None)
        row: dict[str, Any] = {"step": step, "epoch": epoch, "time": round(time.time(), 3), **numbers}

        nonfinite = {name: str(float(value)) for name, value in row.items() if not math.isfinite(value)}
        if nonfinite:
            row |= dict.fromkeys(nonfinite)
            row["nonfinite"] = nonfinite
        self._file.write(row)

    def _write_images(self, name: str, images: Sequence[Image], *, step: int) -> None:
        for number, image in enumerate(images):
            own_name = name if len(images) == 1 else f"{name}/{number}"
            with_png(image, partial(self._write_png, own_name, step=step))

    def _write_png(self, name: str, png: bytes, *, step: int) -> None:
        self._write_medium(name, ".png", lambda path: path.write_bytes(png), step=step)

    def _write_medium(self, name: str, suffix: str, save: Callable[[Path], object], *, step: int) -> None:
        """Save to `media/NAME_STEP.SUFFIX` and remove the files of earlier steps."""
        stem = file_stem(name)
        path = self._media / f"{stem}_{step}{suffix}"
        try:
            self._media.mkdir(exist_ok=True)
            earlier = [file for file in self._media.glob(f"{glob.escape(stem)}_*{suffix}") if file != path]
            save(path)
            for file in earlier:
                # What follows a name may be the rest of a longer one.
                if file.stem.removeprefix(f"{stem}_").isdecimal():
                    file.unlink()
        except OSError as error:
            with suppress(OSError):
                path.unlink()
            warn_of_disk(f"{path} can't be written: {error.strerror or error}", root=self._run_dir.path)


def _save_table(table: Table, path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([table.columns, *table.rows])


@final
class JsonLines:
    """A file of rows, each with its `step`, to append to. Each row reaches the kernel at once, whole or not at all.

    A disk that refuses is reported once, in the log and on the terminal. Rows then wait in memory, and are written
    before the next row once there is room. A file that can't be read is reported once and left as it is: it gets no
    rows. Neither raises. One process at a time may append.
    """

    def __init__(self, path: Path, *, root: Path, last_step: int | None, check: Check | None = None) -> None:
        """Remove rows after `last_step` (None keeps all), and damaged lines, which a warning names.

        Args:
            root: the run directory. Folders between it and the file are made. If it is gone, nothing is, and nothing is
                reported: the trainer does that.
            check: returns what is wrong with a row that was read.
        """
        self._path = path
        self._root = root
        self._check = check
        self._file: FileIO | None = None
        self._pending: deque[bytes] = deque()
        self._is_refused = False
        self._is_unreadable = False
        # What replaces the content, before the first row.
        self._cleaned: str | None = None
        self._clean(last_step=last_step)
        self.flush()

    def remove_after(self, last_step: int) -> None:
        """Remove the rows after this step. A file that can't be read, or written, isn't reported again."""
        if self._is_unreadable:
            return
        if self._file is not None:
            self._file.close()
            self._file = None
        self._clean(last_step=last_step)
        self.flush()

    def _clean(self, *, last_step: int | None) -> None:
        path = self._path
        if not os.path.lexists(path):
            return
        texts = []
        damaged = []
        is_changed = False
        try:
            for line in read_lines(path, check=self._check):
                is_kept = line.row is not None and (last_step is None or line.row["step"] <= last_step)
                if line.row is None:
                    damaged.append(line)
                if is_kept:
                    texts.append(line.text)
                is_changed = is_changed or not is_kept or line.is_repaired
        except OSError as error:
            warn(
                f"{path} can't be read: {error.strerror or error}. Training continues, but it gets no rows. To resume "
                "with it, restore it from a copy or remove it."
            )
            self._is_unreadable = True
            return
        for line in damaged[:_DAMAGED_SHOWN]:
            warn(f"{path}: line {line.number} is damaged and is left out ({line.fault})")
        if len(damaged) > _DAMAGED_SHOWN:
            warn(f"{path}: {len(damaged) - _DAMAGED_SHOWN} more lines are damaged and are left out")
        if is_changed:
            self._cleaned = b"".join(texts).decode()

    def write(self, row: Mapping[str, Any]) -> None:
        """Append `row`. Raises ValueError for a number that is not finite, which JSON doesn't have."""
        if self._is_unreadable:
            return
        self._pending.append(f"{_encode(row)}\n".encode())
        self.flush()

    def flush(self) -> None:
        """Write the pending rows, including those that a full disk refused."""
        if self._is_unreadable:
            return
        try:
            if self._file is None:
                self._file = self._open()
            while self._pending:
                _append(self._file, self._pending[0])
                self._pending.popleft()
        except OSError as error:
            if not self._is_refused:
                text = f"{self._path} can't be written: {error.strerror or error}. Its rows wait in memory"
                warn_of_disk(text, root=self._root)
            self._is_refused = True
            return
        if self._is_refused:
            warn(f"{self._path} is writable again")
        self._is_refused = False

    def _open(self) -> FileIO:
        # If a file is in place of the folder, opening says so better.
        with suppress(FileExistsError):
            make_folders(self._path.parent, root=self._root)
        if self._cleaned is not None:
            write_atomically(self._path, self._cleaned)
            self._cleaned = None
        return self._path.open("ab", buffering=0)

    def close(self) -> None:
        """Write what is pending and close the file; calling it again is fine. A further row opens it again."""
        if self._pending:
            self.flush()
        if self._pending:
            warn_of_disk(f"{self._path} lacks {len(self._pending)} rows that the disk refused", root=self._root)
            self._pending.clear()
        if self._file is not None:
            self._file.close()
            self._file = None


def _append(file: FileIO, row: bytes) -> None:
    """Write all of it, or nothing and raise OSError: a full disk takes a part first."""
    num_written = 0
    try:
        while num_written < len(row):
            num_written += file.write(row[num_written:])
    except OSError:
        file.truncate(os.fstat(file.fileno()).st_size - num_written)
        raise
