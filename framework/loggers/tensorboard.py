"""Curves, texts and media for TensorBoard, through `torch.utils.tensorboard.SummaryWriter`."""

from __future__ import annotations

import errno
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import cache, partial
from operator import methodcaller
from pathlib import Path
from textwrap import indent
from types import ModuleType
from typing import Any, NamedTuple, final

from framework.config.written import load_written_config
from framework.errors import ConfigError
from framework.loggers.encoding import with_png
from framework.loggers.media import finite_values, images_of, split
from framework.media import Artifact, Histogram, Image, Media, Table, Text
from framework.system.rank_log import warn, warn_of_disk
from framework.system.run_dir import RunDir
from framework.types import FitInfo, Logger

_WRITE_EVERY_S = 5
_MAX_SHOWN = 1e19

# The sections of the configuration that say what is trained, and how.
_HPARAMS = (
    "recipe",
    "seed",
    "init_from",
    "model",
    "data",
    "task",
    "optimizer",
    "scheduler",
    "strategy",
    "topology",
    "trainer",
    "callbacks",
)
# The page shows the first five columns, by name, of those that differ: these have a star before the name.
_FIRST_HPARAMS = ("recipe", "seed", "optimizer.lr")
# The best value of the monitored metric, see `Logger.on_results`.
_BEST = "best/"

# The charts of "Custom Scalars": title → which numbers, as a regular expression. One without numbers is left out.
_CHARTS = {
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


class PendingImage(NamedTuple):
    tag: str
    step: int
    height: int
    width: int
    png: Future[bytes]


@final
class _Experiment:
    """Stands in for the SummaryWriter, which may not be open yet, or be another one after a full disk."""

    def __init__(self, logger: TensorBoardLogger) -> None:
        self._logger = logger

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("add_"):
            raise AttributeError(f"The SummaryWriter's methods that add something can be called, and {name} is none.")
        return partial(self._logger.call, name)

    def flush(self) -> None:
        self._logger.flush()

    @property
    def log_dir(self) -> str:
        return str(self._logger.folder)


@final
class TensorBoardLogger(Logger):
    """Writes event files to the run directory: scalars under the names they come with, texts as code blocks.

    A resumed run hides what was logged after the step it resumes from. "Custom Scalars" has the charts to look at
    first, "HParams" each finished run with its configuration and final metrics.

    Numbers are written every few seconds, and by `flush` before each checkpoint.

    A full disk is reported once and doesn't end training: the event file is abandoned, and `flush` tries a new one.
    Numbers logged meanwhile are in `metrics.jsonl` only.

    Args:
        graph: Write the model's graph, traced with the first batch on a copy of the model.
        histograms_every_n_steps: Write histograms of parameters and of gradients, as the optimizer gets them, after so
            many steps each; of what this rank has, if the model is spread over several.
    """

    def __init__(self, *, run_dir: RunDir, graph: bool = False, histograms_every_n_steps: int | None = None) -> None:
        if histograms_every_n_steps is not None and histograms_every_n_steps < 1:
            raise ConfigError(
                f"TensorBoardLogger: histograms_every_n_steps={histograms_every_n_steps} is below 1. Give the number "
                "of steps, or null for none."
            )
        self._run_dir = run_dir
        self._folder = run_dir.tensorboard
        self._wants_graph = graph
        self._histograms_every = histograms_every_n_steps

        # The names of all numbers so far, and the charts that were written for them.
        self._names: set[str] = set()
        self._charts: list[str] = []
        # The step of the last numbers.
        self._step = 0

        # What the next flush writes: values, their step and Unix time; tag, text and step; and calls of a writer.
        self._pending_scalars: list[tuple[dict[str, float], int, float]] = []
        self._pending_texts: list[tuple[str, str, int]] = []
        self._pending_media: list[Callable[[Any], None]] = []
        self._pending_images: list[PendingImage] = []
        self._next_write_s = 0.0

        # A SummaryWriter, once there is something to write.
        self._writer: Any = None
        # TensorBoard hides what older files have from this step on.
        self._purge_step: int | None = None
        self._is_refused = False

    def start(self, info: FitInfo) -> None:
        self._drop_writer()
        self._purge_step = info.start_step + 1 if self._run_dir.event_files else None
        if self._wants_graph:
            from framework.loggers.tensorboard_model import keep_graph

            keep_graph(info.model, add=self._add)
        if self._histograms_every is not None:
            from framework.loggers.tensorboard_model import Histograms

            histograms = Histograms(info, every=self._histograms_every, add=self._add)
            # Set on the object, so that the hook costs nothing without histograms.
            self.on_train_step_end = histograms.on_train_step_end  # type: ignore[method-assign]

    def log(self, values: Mapping[str, float | Media], *, step: int, epoch: int) -> None:
        numbers, media = split(values)
        for tag, value in media.items():
            self._add_medium(tag, value, step=step)
        if numbers:
            self._add_numbers(numbers, step=step)

    def on_results(self, metrics: Mapping[str, float]) -> None:
        """Write what is trained, and how, and of the final metrics those that have no curve.

        The best value comes after its curve, as `val/loss/best`: the dashboard begins with the first name.
        """
        # Afterwards, all names of curves are known.
        self.flush()
        without_curve: dict[str, float] = {}
        for name, value in metrics.items():
            if name.startswith(_BEST):
                without_curve[f"{name.removeprefix(_BEST)}/best"] = value
            elif name not in self._names:
                without_curve[name] = value
        if without_curve:
            self._add_numbers(without_curve, step=self._step)

        config = load_written_config(self._run_dir)
        trained: dict[str, bool | int | float | str] = {}
        for key, setting in _leaves({section: config[section] for section in _HPARAMS if section in config}):
            trained[f"*{key}" if key in _FIRST_HPARAMS else key] = setting
        self._add(lambda writer: _write_hparams(writer, trained))

    def flush(self) -> None:
        has_pending = bool(self._pending_scalars or self._pending_texts or self._pending_media or self._pending_images)
        # After a refusal, an empty flush tries whether the disk takes a new file.
        if self._writer is None and not has_pending and not self._is_refused:
            return
        try:
            if self._writer is None:
                self._open()
            self._write()
        except OSError as error:
            if not self._is_refused:
                self._is_refused = True
                text = f"{self._folder} can't be written: {error.strerror or error}. TensorBoard will lack numbers"
                warn_of_disk(text, root=self._run_dir.path)
            self._pending_scalars.clear()
            self._pending_media.clear()
            self._pending_images.clear()
            self._drop_writer()

    def close(self) -> None:
        """Write everything out; calling it again is fine."""
        self.flush()
        self._drop_writer()

    @property
    def folder(self) -> Path:
        """The folder of the event files."""
        return self._folder

    @property
    def experiment(self) -> Any:
        """What has the methods of the SummaryWriter, for `self.logger.experiment` of a LightningModule."""
        return _Experiment(self)

    def call(self, method: str, *arguments: Any, **keywords: Any) -> None:
        """Call a method of the SummaryWriter, before its arguments change."""
        self._add(methodcaller(method, *arguments, **keywords))
        self.flush()

    # What is to be written

    def _add_numbers(self, numbers: Mapping[str, float], *, step: int) -> None:
        self._step = step
        if self._is_refused:
            return
        self._pending_scalars.append((dict(numbers), step, time.time()))
        # Written together: waking the writer's thread for each log would cost a small step 5 % of its time.
        if time.monotonic() > self._next_write_s:
            self.flush()

    def _add_medium(self, tag: str, value: Media, *, step: int) -> None:
        """Keep a copy of what TensorBoard shows of the value. It has no captions, and of files only the path."""
        if isinstance(value, Text):
            self._pending_texts.append((tag, value.text, step))
        elif isinstance(value, Table):
            self._add(methodcaller("add_text", tag, value.markdown(), step))
        elif isinstance(value, Artifact):
            self._add(methodcaller("add_text", tag, f"`{Path(value.path).absolute()}`", step))
        elif isinstance(value, Histogram):
            finite = finite_values(value.values)
            if finite.size:
                # Its bins end at 1e20, and it raises if all values lie beyond them.
                shown = finite.clip(-_MAX_SHOWN, _MAX_SHOWN)
                self._add(methodcaller("add_histogram", tag, shown, step))
        else:
            images = images_of(value)
            for number, image in enumerate(images):
                name = tag if len(images) == 1 else f"{tag}/{number}"
                self._add_image(name, image, step=step)

    def _add_image(self, tag: str, image: Image, *, step: int) -> None:
        """Have an image written by the first flush after it was encoded."""
        height, width = image.pixels.shape[-2:]
        if not self._is_refused:
            self._pending_images.append(PendingImage(tag, step, height, width, with_png(image, bytes)))

    def _add(self, write: Callable[[Any], None]) -> None:
        """Have the next flush call `write` with the SummaryWriter."""
        if not self._is_refused:
            self._pending_media.append(write)

    # Writing

    def _open(self) -> None:
        if not self._folder.is_dir():
            # The SummaryWriter would make it again.
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._folder))
        # With this module, tensorboard doesn't import tensorflow for its file functions, which takes seconds.
        sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))
        # Takes 0.2 s, so it is imported after the first steps.
        from torch.utils.tensorboard import SummaryWriter

        _silence_writer_threads()
        self._writer = SummaryWriter(str(self._folder), purge_step=self._purge_step)
        self._purge_step = None
        self._charts = []
        if self._is_refused:
            self._is_refused = False
            warn(f"{self._folder} is writable again")

    def _drop_writer(self) -> None:
        writer = self._writer
        self._writer = None
        if writer is not None:
            # Raised if the disk is full.
            with suppress(OSError):
                writer.file_writer.close()

    def _write(self) -> None:
        for tag, text, step in self._pending_texts:
            # Indented, not fenced: a fence would end at the first fence inside the text.
            self._writer.add_text(tag, indent(text, "    ", lambda _: True), step)
        self._write_scalars()
        self._write_charts()
        for write in self._pending_media:
            write(self._writer)
        self._write_images()
        self._writer.flush()

        self._pending_media.clear()
        self._pending_texts.clear()
        self._pending_scalars.clear()
        self._next_write_s = time.monotonic() + _WRITE_EVERY_S

    def _write_images(self) -> None:
        """Write the images that are encoded; the others stay for the next flush."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        encoded = [image for image in self._pending_images if image.png.done()]
        self._pending_images = [image for image in self._pending_images if image not in encoded]
        for tag, step, height, width, png in encoded:
            content = Summary.Image(height=height, width=width, encoded_image_string=png.result())
            self._writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=tag, image=content)]), step)

    def _write_scalars(self) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        for values, step, unix_s in self._pending_scalars:
            self._names |= values.keys()
            # One event for all of them: `add_scalar`, with one for each, takes five times as long.
            summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
            self._writer.file_writer.add_summary(summary, step, unix_s)

    def _write_charts(self) -> None:
        """Write the layout of "Custom Scalars" if there are numbers for another chart."""
        charts = [title for title, pattern in _CHARTS.items() if any(map(re.compile(pattern).match, self._names))]
        if charts != self._charts:
            layout = {title: ["Multiline", [_CHARTS[title]]] for title in charts}
            self._writer.add_custom_scalars({"overview": layout})
            self._charts = charts


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
        elif isinstance(value, (bool, int, float, str)):
            yield f"{prefix}{key}", value
        elif value is not None:
            yield f"{prefix}{key}", str(value)


@cache
def _silence_writer_threads() -> None:
    """Print no traceback of a writer's thread that a full disk ends: the writer's next call raises that error."""
    before = threading.excepthook

    def hook(arguments: threading.ExceptHookArgs) -> None:
        is_writer = type(arguments.thread).__module__.startswith("tensorboard.")
        if not (is_writer and isinstance(arguments.exc_value, OSError)):
            before(arguments)

    threading.excepthook = hook
