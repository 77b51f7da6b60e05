"""Curves, texts and media for TensorBoard, through `torch.utils.tensorboard.SummaryWriter`."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from operator import methodcaller
from pathlib import Path
from textwrap import indent
from types import ModuleType
from typing import Any, final

import numpy as np

from framework.errors import ConfigError
from framework.loggers.media import array_of, markdown, pixels_of
from framework.media import Image, Table
from framework.system.rank_log import warn
from framework.system.run_dir import RunDir
from framework.types import FitInfo, StepInfo

_WRITE_EVERY_S = 5
_HPARAMS = (  # the sections that say what is trained
    *("recipe", "seed", "init_from", "model", "data", "task", "optimizer", "scheduler", "strategy", "topology"),
    *("trainer", "callbacks"),
)
_CHARTS = {  # of "Custom Scalars": title → which numbers, as a regular expression; those without any are left out
    "loss": r"(train|val)/(.+/)?loss$",
    "validation": r"val/(?!(.+/)?loss$)",
    "learning rate": r"train/lr(/|$)",
    "gradient norm": r"train/(.+/)?grad_norm$",
    "samples per second": r"train/samples_per_s$",
    "shares of a step": r"time/",
    "skew: own time beyond the other ranks', of a step": r"skew/(worst|rank_\d+)$",
    "peak memory of the ranks, GB": r"device/memory_gb",
    "MFU": r"train/mfu$",
    "TFLOP per second": r"train/tflop_per_s$",
}


@final
class TensorBoardLogger:
    """Writes event files to the run's tensorboard folder: scalars under the names they come with, texts as code blocks.

    A resumed run hides what was logged after the step it resumes from. "Custom Scalars" has the charts to look at
    first, "HParams" each finished run with its configuration and final metrics.

    Numbers are written every few seconds, and by `flush` before each checkpoint and evaluation.

    A full disk is reported once and doesn't end training: the event file is abandoned, and `flush` tries a new one.
    Numbers logged meanwhile are in `metrics.jsonl` only.
    """

    def __init__(self, *, run_dir: RunDir, graph: bool = False, histograms_every_n_steps: int | None = None) -> None:
        """Open nothing yet.

        graph: Write the model's graph, traced with the first batch on a copy of the model.
        histograms_every_n_steps: Write histograms of parameters and of gradients, as the optimizer gets them, after so
            many steps each. Of what this rank has, if the model is spread over several.
        """
        if histograms_every_n_steps is not None and histograms_every_n_steps < 1:
            raise ConfigError(
                f"TensorBoardLogger: histograms_every_n_steps={histograms_every_n_steps} is below 1. Give the number "
                "of steps, or null for none."
            )
        self._folder = run_dir.tensorboard
        self._wants_graph = graph
        self._histograms_every = histograms_every_n_steps
        self._names: set[str] = set()  # of all numbers so far
        self._charts: list[str] = []  # those that were written
        self._step = 0  # of the last numbers
        self.step: Callable[[StepInfo], None] | None = None  # called after every step, if there is one
        self._writer: Any = None  # a SummaryWriter
        self._pending_texts: list[tuple[str, str, int]] = []
        self._pending_media: list[Callable[[Any], None]] = []  # each writes to a SummaryWriter
        self._pending_scalars: list[tuple[dict[str, float], int, float]] = []  # values, step, Unix time
        self._next_write_s = 0.0
        self._purge_step: int | None = None  # TensorBoard hides what older files have from this step on
        self._is_refused = False

    def fit_start(self, info: FitInfo) -> None:
        self._drop_writer()
        self._purge_step = info.start_step + 1 if self._folder.is_dir() else None
        if self._wants_graph:
            from framework.loggers.tensorboard_model import keep_graph

            keep_graph(info.model, add=self._add)
        if self._histograms_every is not None:
            from framework.loggers.tensorboard_model import Histograms

            self.step = Histograms(info, every=self._histograms_every, add=self._add).finish_step

    def metrics(self, values: Mapping[str, float], *, step: int, epoch: int) -> None:
        self._step = step
        if values and not self._is_refused:
            self._pending_scalars.append((dict(values), step, time.time()))
            # Written together: waking the writer's thread for each log would cost a small step 5 % of its time.
            if time.monotonic() > self._next_write_s:
                self.flush()

    def text(self, tag: str, text: str, *, step: int) -> None:
        self._pending_texts.append((tag, text, step))

    def images(self, tag: str, images: Sequence[Image], *, step: int) -> None:
        """Captions aren't shown: TensorBoard has none."""
        for number, image in enumerate(images):
            name = tag if len(images) == 1 else f"{tag}/{number}"
            self._add(methodcaller("add_image", name, pixels_of(image), step, dataformats="HWC"))

    def histogram(self, tag: str, values: Any, *, step: int) -> None:
        flat = array_of(values).astype(np.float64).reshape(-1)
        finite = flat[np.isfinite(flat)]
        if finite.size:
            self._add(methodcaller("add_histogram", tag, finite, step))

    def table(self, tag: str, table: Table, *, step: int) -> None:
        self._add(methodcaller("add_text", tag, markdown(table), step))

    def artifact(self, tag: str, path: Path, *, step: int) -> None:
        """Note where it is: event files hold no files."""
        self._add(methodcaller("add_text", tag, f"`{path}`", step))

    def hparams(self, config: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Write what is trained, and how, and of the final metrics those that have no curve."""
        self.flush()  # so that all names of curves are known
        final = {name: value for name, value in metrics.items() if name not in self._names}
        self.metrics(final, step=self._step, epoch=0)
        own = dict(_leaves({key: config[key] for key in _HPARAMS if key in config}))
        self._add(lambda writer: _write_hparams(writer, own))

    def _add(self, write: Callable[[Any], None]) -> None:
        """Have the writer written to by the next flush."""
        if not self._is_refused:
            self._pending_media.append(write)

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
        self._charts = []
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

        for tag, text, step in self._pending_texts:
            # Indented, not fenced: a fence would end at the first fence inside the text.
            self._writer.add_text(tag, indent(text, "    ", lambda _: True), step)
        for values, step, unix_s in self._pending_scalars:
            self._names |= values.keys()
            # One event for all of them: `add_scalar`, with one for each, takes five times as long.
            summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
            self._writer.file_writer.add_summary(summary, step, unix_s)
        charts = [title for title, tags in _CHARTS.items() if any(map(re.compile(tags).match, self._names))]
        if charts != self._charts:  # TensorBoard uses the last ones
            self._writer.add_custom_scalars({"overview": {title: ["Multiline", [_CHARTS[title]]] for title in charts}})
            self._charts = charts
        for write in self._pending_media:
            write(self._writer)
        self._writer.flush()
        self._pending_media.clear()
        self._pending_texts.clear()
        self._pending_scalars.clear()
        self._next_write_s = time.monotonic() + _WRITE_EVERY_S


def _write_hparams(writer: Any, config: dict[str, bool | int | float | str]) -> None:
    from torch.utils.tensorboard.summary import hparams

    # Without the first summary, which lists the keys: TensorBoard would show those of one run only.
    _, *begin_and_end = hparams(config, {})
    for summary in begin_and_end:
        writer.file_writer.add_summary(summary)


def _leaves(config: Mapping[str, Any], *, prefix: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    """Yield what is set, by dotted keys; lists as texts."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, prefix=f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", value if isinstance(value, (bool, int, float, str)) else str(value)


@cache
def _silence_writer_threads() -> None:
    """Print no traceback of a writer's thread that a full disk ends: the writer's next call raises that error."""
    before = threading.excepthook

    def hook(arguments: threading.ExceptHookArgs) -> None:
        is_writer = type(arguments.thread).__module__.startswith("tensorboard.")
        if not (is_writer and isinstance(arguments.exc_value, OSError)):
            before(arguments)

    threading.excepthook = hook
