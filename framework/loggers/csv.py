"""metrics.csv: a row for each step, a column for each name."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, final

from framework.config.parse import flatten
from framework.errors import ConfigError
from framework.system.files import read_bytes
from framework.system.json_lines import MAX_FILE_BYTES
from framework.system.rank_log import warn
from framework.system.run_dir import RunDir, write_atomically
from framework.types import FitInfo

Row = dict[str, Any]


@final
class CSVLogger:
    """Write `metrics.csv`: one row for each step; a new name adds a column. Media is left out.

    At the end, `hparams.csv` gets one row: the configuration by dotted keys, and the final metrics. A resumed run drops
    the rows after the step it resumes from. A full disk is reported once; the rows of that time are missing.
    """

    def __init__(self, *, run_dir: RunDir) -> None:
        self._path = run_dir.path / "metrics.csv"
        self._columns = ["step", "epoch"]
        self._file: FileIO | None = None
        self._row: Row = {}  # the last one, which may still grow
        self._begin = 0  # where it begins in the file
        self._is_refused = False

    def fit_start(self, info: FitInfo) -> None:
        self.close()
        self._try(lambda: self._open(last_step=info.start_step))

    def metrics(self, values: Mapping[str, float], *, step: int, epoch: int) -> None:
        self._try(lambda: self._write(values, step=step, epoch=epoch))

    def text(self, tag: str, text: str, *, step: int) -> None:
        """Do nothing: the file is for numbers."""

    def hparams(self, config: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        row = {**flatten(config), **metrics}
        self._try(lambda: write_atomically(self._path.with_name("hparams.csv"), _text(list(row), [row], header=True)))

    def close(self) -> None:
        """Close the file; calling it again is fine."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, values: Mapping[str, float], *, step: int, epoch: int) -> None:
        file = self._file or self._open(last_step=None)
        if self._row.get("step") != step:
            self._row, self._begin = {"step": step, "epoch": epoch}, file.seek(0, io.SEEK_END)
        self._row |= values
        if new := [name for name in self._row if name not in self._columns]:
            file.truncate(self._begin)
            before = _rows(self._path)
            self._columns += new
            self._rewrite([*before, self._row])
            return
        file.seek(self._begin)
        file.truncate()
        try:
            file.write(_text(self._columns, [self._row]).encode())
        except OSError:
            file.truncate(self._begin)
            raise

    def _open(self, *, last_step: int | None) -> FileIO:
        """Open the file without rows after `last_step` (None keeps all)."""
        rows = _rows(self._path) if self._path.exists() else []
        kept = [row for row in rows if last_step is None or row["step"] <= last_step]
        self._columns = list(dict.fromkeys([*self._columns, *(name for row in kept for name in row)]))
        return self._rewrite(kept)

    def _rewrite(self, rows: list[Row]) -> FileIO:
        self.close()
        head = _text(self._columns, rows[:-1], header=True)
        write_atomically(self._path, head + _text(self._columns, rows[-1:]))
        self._row, self._begin = (rows[-1] if rows else {}), len(head.encode())
        self._file = FileIO(self._path, "r+")
        return self._file

    def _try(self, write: Any) -> None:
        try:
            write()
        except OSError as error:
            if not self._is_refused:
                warn(f"{self._path} can't be written: {error.strerror or error}. It will lack rows")
            self._is_refused = True


def _rows(path: Path) -> list[Row]:
    """Return the complete rows of a file, without empty cells. A warning names each line that is damaged.

    Raises ConfigError if the file can't be read, or its first line has no names.
    """
    try:
        content = read_bytes(path, max_bytes=MAX_FILE_BYTES)
        # A kill may have left a part of a line.
        head, *lines = content[: content.rfind(b"\n") + 1].split(b"\n")[:-1] or [b""]
        columns = _cells(head)
        if content and columns[:2] != ["step", "epoch"]:
            raise ValueError("its first line doesn't begin with step,epoch")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path} can't be read: {reason}.\nRestore it from a copy, or remove it.") from error
    rows = []
    for number, line in enumerate(lines, start=2):
        try:
            cells = dict(zip(columns, _cells(line), strict=True))
            for value in filter(None, cells.values()):
                float(value)
            rows.append({**{name: value for name, value in cells.items() if value}, "step": int(cells["step"])})
        except ValueError as error:
            warn(f"{path}: line {number} is damaged and is left out ({error})")
    return rows


def _cells(line: bytes) -> list[str]:
    """Return the cells of a line. Raises ValueError for one that isn't CSV."""
    try:
        return next(csv.reader([line.decode()], strict=True), [])
    except csv.Error as error:
        raise ValueError(str(error)) from error


def _text(columns: list[str], rows: Iterable[Row], *, header: bool = False) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
