"""Curves and texts for TensorBoard."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from textwrap import indent
from typing import final

from framework.loggers.events import EventFile
from framework.loggers.names import of_evaluation
from framework.run_dir import RunDir
from framework.types import FitInfo

_OF_RANKS = "skew/"
_CHARTS = {
    "ranks": {
        "own time beyond the others', of a step": r"skew/(worst|rank_\d+)",
        "shares of a step": r"time/.*",
    }
}


@final
class TensorBoardLogger:
    """Writes event files to the run's tensorboard folder: scalars under the names they come with, texts as code blocks.

    After a resume TensorBoard shows no step twice: what was written beyond the step the run goes on from is hidden.
    What that step has already is not written again. A file is begun with the first numbers to write; texts from before
    `fit_start` wait for it, so none is hidden. A full disk ends nothing (see `Appender`). Where times of ranks are
    logged, a chart of all of them is under "Custom Scalars".
    """

    def __init__(self, *, run_dir: RunDir) -> None:
        self._folder = run_dir.tensorboard
        self._writer: EventFile | None = None
        self._waiting_texts: list[tuple[str, str]] = []
        self._start_step = 0
        self._resumed = False
        self._has_charts = False

    def fit_start(self, info: FitInfo) -> None:
        if self._writer is not None:
            self._writer.close()
        self._start_step, self._has_charts = info.start_step, False
        self._resumed = self._folder.is_dir()
        # TensorBoard hides the steps from purge_step on; the one started from was logged before.
        self._writer = self._open(purge_step=info.start_step + 1 if self._resumed else None)

    def metrics(self, values: Mapping[str, float], *, step: int, epoch: int) -> None:
        if self._writer is None:
            self._start_step = step
        writer = self._opened()
        if self._resumed and step == self._start_step:  # seldom: where nothing but the test was left to do
            known = self._scalars_at(step)
            values = {name: value for name, value in values.items() if name not in known}
        if not self._has_charts and any(name.startswith(_OF_RANKS) for name in values):
            writer.charts(_CHARTS)
            self._has_charts = True
        if values:
            writer.scalars(values, step=step)
        if of_evaluation(values):
            writer.flush()

    def text(self, tag: str, text: str) -> None:
        if self._writer is None:
            self._waiting_texts.append((tag, text))
        else:
            self._write_text(self._writer, tag, text)

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Write everything out; another call, or one without anything to write, is fine."""
        if self._waiting_texts:
            self._opened()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _opened(self) -> EventFile:
        if self._writer is None:
            self._writer = self._open(purge_step=None)
        return self._writer

    def _scalars_at(self, step: int) -> set[str]:
        """Names that have a value at this step, as TensorBoard shows it."""
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(self._folder), size_guidance={"scalars": 0})
        told = logging.getLogger("tensorboard")
        level = told.level
        told.setLevel(logging.ERROR)  # it warns of the very steps that a resumed run takes back
        try:
            events.Reload()
        finally:
            told.setLevel(level)
        names = events.Tags()["scalars"]
        return {name for name in names if any(event.step == step for event in events.Scalars(name))}

    def _open(self, *, purge_step: int | None) -> EventFile:
        writer = EventFile(self._folder, purge_step=purge_step)
        for tag, text in self._waiting_texts:
            self._write_text(writer, tag, text)
        self._waiting_texts.clear()
        return writer

    def _write_text(self, writer: EventFile, tag: str, text: str) -> None:
        # Indented, not fenced: a fence would end at the first fence inside the text.
        writer.text(tag, indent(text, "    ", lambda _: True), step=self._start_step)
