"""Curves, texts and media for TensorBoard, through `torch.utils.tensorboard.SummaryWriter`."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from operator import methodcaller
from pathlib import Path
from textwrap import indent
from types import ModuleType
from typing import Any, final

import numpy as np

from framework.loggers.media import array_of, markdown, pixels_of
from framework.monitoring.rank_log import warn
from framework.system.run_dir import RunDir
from framework.types import FitInfo, Image, Table

_WRITE_EVERY_S = 5
_RANK_METRICS = "skew/"
_RANK_CHARTS = {
    "ranks": {
        "own time beyond the others', of a step": ["Multiline", [r"skew/(worst|rank_\d+)"]],
        "shares of a step": ["Multiline", [r"time/.*"]],
    }
}


@final
class TensorBoardLogger:
    """Writes event files to the run's tensorboard folder: scalars under the names they come with, texts as code blocks.

    A resumed run hides what was logged after the step it resumes from. If times of ranks are logged, "Custom Scalars"
    has a chart of all of them.

    Numbers are written every few seconds, and by `flush` before each checkpoint and evaluation.

    A full disk is reported once and doesn't end training: the event file is abandoned, and `flush` tries a new one.
    Numbers logged meanwhile are in `metrics.jsonl` only.
    """

    def __init__(self, *, run_dir: RunDir) -> None:
        self._folder = run_dir.tensorboard
        self._writer: Any = None  # a SummaryWriter
        self._pending_texts: list[tuple[str, str]] = []
        self._pending_media: list[Callable[[Any], None]] = []  # each writes to a SummaryWriter
        self._pending_scalars: list[tuple[dict[str, float], int, float]] = []  # values, step, Unix time
        self._next_write_s = 0.0
        self._start_step: int | None = None
        self._purge_step: int | None = None  # TensorBoard hides what older files have from this step on
        self._is_refused = False

    def fit_start(self, info: FitInfo) -> None:
        self._drop_writer()
        self._start_step = info.start_step
        self._purge_step = info.start_step + 1 if self._folder.is_dir() else None

    def metrics(self, values: Mapping[str, float], *, step: int, epoch: int) -> None:
        if self._start_step is None:
            self._start_step = step
        if values and not self._is_refused:
            self._pending_scalars.append((dict(values), step, time.time()))
            # Written together: waking the writer's thread for each log would cost a small step 5 % of its time.
            if time.monotonic() > self._next_write_s:
                self.flush()

    def text(self, tag: str, text: str) -> None:
        self._pending_texts.append((tag, text))

    def images(self, tag: str, images: Sequence[Image], *, step: int) -> None:
        """Captions aren't shown: TensorBoard has none."""
        for number, image in enumerate(images):
            name = tag if len(images) == 1 else f"{tag}/{number}"
            self._add("add_image", name, pixels_of(image), step, dataformats="HWC")

    def histogram(self, tag: str, values: Any, *, step: int) -> None:
        flat = array_of(values).astype(np.float64).reshape(-1)
        finite = flat[np.isfinite(flat)]
        if finite.size:
            self._add("add_histogram", tag, finite, step)

    def table(self, tag: str, table: Table, *, step: int) -> None:
        self._add("add_text", tag, markdown(table), step)

    def artifact(self, tag: str, path: Path, *, step: int) -> None:
        """Note where it is: event files hold no files."""
        self._add("add_text", tag, f"`{path}`", step)

    def _add(self, method: str, *arguments: Any, **keywords: Any) -> None:
        if not self._is_refused:
            self._pending_media.append(methodcaller(method, *arguments, **keywords))

    def flush(self) -> None:
        pending = self._pending_scalars or self._pending_texts or self._pending_media
        if self._writer is None and not (pending or self._is_refused):
            return
        try:
            if self._writer is None:
                self._open()
            self._write()
        except OSError as error:
            if not self._is_refused:
                self._is_refused = True
                warn(f"{self._folder} can't be written: {error.strerror or error}. TensorBoard will lack numbers")
            self._pending_scalars.clear()
            self._pending_media.clear()
            self._drop_writer()

    def close(self) -> None:
        """Write everything out; calling it again is fine."""
        self.flush()
        self._drop_writer()

    def _open(self) -> None:
        # With this module, tensorboard doesn't import tensorflow for its file functions, which takes seconds.
        sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))
        from torch.utils.tensorboard import SummaryWriter  # takes 0.2 s: after the first steps

        _silence_writer_threads()
        self._writer = SummaryWriter(str(self._folder), purge_step=self._purge_step)
        self._purge_step = None
        self._has_charts = False
        if self._is_refused:
            self._is_refused = False
            warn(f"{self._folder} is written again")

    def _drop_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with suppress(OSError):  # of a full disk
                writer.file_writer.close()

    def _write(self) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        for tag, text in self._pending_texts:
            # Indented, not fenced: a fence would end at the first fence inside the text.
            self._writer.add_text(tag, indent(text, "    ", lambda _: True), self._start_step or 0)
        for values, step, unix_s in self._pending_scalars:
            if not self._has_charts and any(name.startswith(_RANK_METRICS) for name in values):
                self._writer.add_custom_scalars(_RANK_CHARTS)
                self._has_charts = True
            # One event for all of them: `add_scalar`, with one for each, takes five times as long.
            summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
            self._writer.file_writer.add_summary(summary, step, unix_s)
        for write in self._pending_media:
            write(self._writer)
        self._writer.flush()
        self._pending_media.clear()
        self._pending_texts.clear()
        self._pending_scalars.clear()
        self._next_write_s = time.monotonic() + _WRITE_EVERY_S


@cache
def _silence_writer_threads() -> None:
    """Print no traceback of a writer's thread that a full disk ends: the writer's next call raises that error."""
    before = threading.excepthook

    def hook(arguments: threading.ExceptHookArgs) -> None:
        is_writer = type(arguments.thread).__module__.startswith("tensorboard.")
        if not (is_writer and isinstance(arguments.exc_value, OSError)):
            before(arguments)

    threading.excepthook = hook
