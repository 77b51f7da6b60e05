"""metrics.jsonl: one JSON object per line, for programs."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from typing import Any, final

from framework.appending import Appender
from framework.loggers.names import of_evaluation
from framework.loggers.pace import Pace
from framework.rows import open_rows, read_rows
from framework.run_dir import RunDir
from framework.types import FitInfo

_encode = json.JSONEncoder(allow_nan=False).encode  # made once: `json.dumps` makes one at each call


@final
class JsonlLogger:
    """Appends one line per `metrics` call: {"step", "epoch", "time" (Unix seconds), and every value under its name}.

    Each line is valid JSON. Lines of training reach the file at a `Pace`, and those of an evaluation at once. A value
    that is not finite is null there, and `nonfinite` says what it was: {"train/loss": null, "nonfinite": {"train/loss":
    "nan"}}. When a run is resumed, lines of later steps than the one it goes on from are cut off, as is a line that a
    kill left unfinished; what that step has already is not written again. A full disk ends nothing (see `Appender`).
    """

    def __init__(self, *, run_dir: RunDir) -> None:
        self._path = run_dir.metrics_file
        self._file: Appender | None = None
        self._start_step = -1
        self._known: set[str] = set()  # names that the step gone on from has
        self._waiting: list[dict[str, Any]] = []
        self._pace = Pace()

    def fit_start(self, info: FitInfo) -> None:
        self.close()
        self._file = open_rows(self._path, last_step=info.start_step)
        self._start_step = info.start_step
        self._known = {name for row in read_rows(self._path) if row["step"] == info.start_step for name in row}

    def metrics(self, values: Mapping[str, float], *, step: int, epoch: int) -> None:
        if step == self._start_step:
            values = {name: value for name, value in values.items() if name not in self._known}
            if not values:
                return
        self._waiting.append({"step": step, "epoch": epoch, "time": round(time.time(), 3), **values})
        if self._pace.is_due() or of_evaluation(values):
            self._write_waiting()

    def text(self, tag: str, text: str) -> None:
        """Nothing: a text is no metric, and the config lies in a file of its own."""

    def flush(self) -> None:
        """Give all of it to the kernel; try again what a full disk didn't take."""
        self._write_waiting()
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        self._write_waiting()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write_waiting(self) -> None:
        if not self._waiting:
            return
        if self._file is None:
            self._file = open_rows(self._path, last_step=None)
        waiting, self._waiting = self._waiting, []  # a row that can't be written is told once
        self._file.write(b"".join([_line(row) for row in waiting]))
        self._pace.note()


def _line(row: dict[str, Any]) -> bytes:
    nonfinite = {name: str(float(value)) for name, value in row.items() if not math.isfinite(value)}
    if nonfinite:
        row |= dict.fromkeys(nonfinite) | {"nonfinite": nonfinite}
    return f"{_encode(row)}\n".encode()
