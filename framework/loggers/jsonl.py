"""metrics.jsonl: one JSON object per line, for programs."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, final

from framework.run_dir import RunDir, write_atomically
from framework.types import FitInfo


@final
class JsonlLogger:
    """Appends one line per `metrics` call: {"step", "epoch", "time" (Unix seconds), and every value under its name}.

    Each line is valid JSON and reaches the file at once. A value that is not finite is null there, and `nonfinite`
    says what it was: {"train/loss": null, "nonfinite": {"train/loss": "nan"}}. When a run is resumed, lines of later
    steps than the one it goes on from are cut off, as is a line that a kill left unfinished.
    """

    def __init__(self, *, run_dir: RunDir) -> None:
        self._path = run_dir.metrics_file
        self._file: IO[str] | None = None

    def fit_start(self, info: FitInfo) -> None:
        self.close()
        self._file = _open(self._path, last_step=info.start_step)

    def metrics(self, values: Mapping[str, float], *, step: int, epoch: int) -> None:
        if self._file is None:
            self._file = _open(self._path, last_step=None)
        row = {"step": step, "epoch": epoch, "time": round(time.time(), 3)}
        nonfinite = {name: str(float(value)) for name, value in values.items() if not math.isfinite(value)}
        finite = {name: None if name in nonfinite else value for name, value in values.items()}
        extra = {"nonfinite": nonfinite} if nonfinite else {}
        self._file.write(json.dumps({**row, **finite, **extra}, allow_nan=False) + "\n")

    def text(self, tag: str, text: str) -> None:
        """Nothing: a text is no metric, and the config lies in a file of its own."""

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _open(path: Path, *, last_step: int | None) -> IO[str]:
    """The file to append to, without lines of steps after `last_step` and without unfinished ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        text = path.read_text(errors="replace")
        kept = "".join(_kept_lines(text, last_step=last_step))
        if kept != text:
            write_atomically(path, kept)
    return path.open("a", buffering=1)


def _kept_lines(text: str, *, last_step: int | None) -> Iterator[str]:
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n"):
            return
        try:
            kept = last_step is None or json.loads(line)["step"] <= last_step
        except (ValueError, TypeError, KeyError):
            kept = False
        if kept:
            yield line
