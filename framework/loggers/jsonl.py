"""metrics.jsonl: one JSON object per line, for programs."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, final

from framework.system.json_lines import JsonLines
from framework.system.run_dir import RunDir
from framework.types import FitInfo


@final
class JsonlLogger:
    """Appends one line per `metrics` call: {"step", "epoch", "time" (Unix seconds), and every value under its name}.

    A value that is not finite is null, and `nonfinite` says what it was: {"train/loss": null, "nonfinite":
    {"train/loss": "nan"}}. A resumed run cuts off lines of later steps than it resumes from. A full disk does not end
    training (see `JsonLines`).
    """

    def __init__(self, *, run_dir: RunDir) -> None:
        self._path = run_dir.metrics_file
        self._file: JsonLines | None = None

    def fit_start(self, info: FitInfo) -> None:
        self.close()
        self._file = JsonLines(self._path, last_step=info.start_step)

    def metrics(self, values: Mapping[str, float], *, step: int, epoch: int) -> None:
        if self._file is None:
            self._file = JsonLines(self._path, last_step=None)
        row: dict[str, Any] = {"step": step, "epoch": epoch, "time": round(time.time(), 3), **values}
        if nonfinite := {name: str(float(value)) for name, value in row.items() if not math.isfinite(value)}:
            row |= dict.fromkeys(nonfinite) | {"nonfinite": nonfinite}
        self._file.write(row)

    def text(self, tag: str, text: str) -> None:
        """Do nothing: the config has a file of its own."""

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
