"""metrics.jsonl and TensorBoard's files have every number once, in a run that is killed or resumed."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from tensorboard.plugins.custom_scalar import layout_pb2
from torch import nn

from framework import Text
from framework.loggers import JsonlLogger, TensorBoardLogger
from framework.types import FitInfo
from tests.helpers import results
from tests.helpers.disks import full_at
from tests.helpers.internals import RunDir

Logger = JsonlLogger | TensorBoardLogger
Curves = dict[str, list[tuple[int, Any]]]
# The loggers don't look at it.
OPTIMIZER: Any = None


def info(start_step: int) -> FitInfo:
    return FitInfo(
        nn.Identity(), start_step, total_steps=None, steps_per_epoch=10, max_epochs=None, optimizer=OPTIMIZER
    )


def rows(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, each of which has to be JSON as the standard has it."""
    text = (folder / "metrics.jsonl").read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


def of_rows(folder: Path) -> Curves:
    curves: Curves = defaultdict(list)
    for row in rows(folder):
        for name in row.keys() - {"step", "epoch", "time", "nonfinite"}:
            curves[name].append((row["step"], row[name]))
    return curves


def of_events(folder: Path) -> Curves:
    events = results.events(folder)
    return {name: [(e.step, pytest.approx(e.value)) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def texts(folder: Path, tag: str) -> list[str]:
    tensors = results.events(folder).Tensors(f"{tag}/text_summary")
    return [event.tensor_proto.string_val[0].decode() for event in tensors]


@pytest.fixture(params=[JsonlLogger, TensorBoardLogger])
def logger_type(request: pytest.FixtureRequest) -> type[Logger]:
    kind: type[Logger] = request.param
    return kind


@pytest.fixture
def begin(logger_type: type[Logger], tmp_path: Path) -> Callable[..., Logger]:
    """A logger of the run; start: the step its training starts from, None without a training."""

    def new(start: int | None = 0) -> Logger:
        logger = logger_type(run_dir=RunDir(tmp_path))
        if start is not None:
            logger.start(info(start))
        return logger

    return new


@pytest.fixture
def curves(logger_type: type[Logger], tmp_path: Path) -> Callable[[], Curves]:
    """What the files show: name → steps and values."""
    return lambda: dict((of_rows if logger_type is JsonlLogger else of_events)(tmp_path))


Begin = Callable[..., Logger]
Read = Callable[[], Curves]


def test_what_was_flushed_outlives_a_kill(begin: Begin, curves: Read) -> None:
    """Loggers are flushed before every checkpoint, which must not be ahead of the log."""
    threads = set(threading.enumerate())
    logger = begin()
    # Nothing is open yet.
    logger.flush()
    for step in (1, 2, 3):
        logger.log({"train/loss": 0.5}, step=step, epoch=0)
        logger.flush()
        logger.log({"val/loss": 0.5}, step=step, epoch=0)
        assert [at for at, _ in curves()["train/loss"]] == [*range(1, step + 1)]
    logger.flush()
    assert [at for at, _ in curves()["val/loss"]] == [1, 2, 3]
    logger.close()
    assert set(threading.enumerate()) == threads


def test_a_resumed_run_has_every_step_once(begin: Begin, curves: Read) -> None:
    for start, end in ((0, 8), (5, 7), (6, 10)):
        logger = begin(start)
        for step in range(start + 1, end + 1):
            logger.log({"train/loss": 100.0 * start + step}, step=step, epoch=0)
        logger.close()
    resumed = [(step, 600.0 + step) for step in range(7, 11)]
    assert curves()["train/loss"] == [*((step, float(step)) for step in range(1, 6)), (6, 506.0), *resumed]
    logger = begin(0)
    logger.log({"train/loss": 9.0}, step=1, epoch=0)
    logger.close()
    assert curves()["train/loss"] == [(1, 9.0)]


def test_nothing_logged_leaves_no_file_behind(begin: Begin, tmp_path: Path) -> None:
    begin(None).close()
    assert list(tmp_path.iterdir()) == []


# metrics.jsonl


def test_non_finite_numbers_are_null_and_named(tmp_path: Path) -> None:
    logger = JsonlLogger(run_dir=RunDir(tmp_path))
    logger.log({"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0}, step=1, epoch=0)
    logger.close()
    (row,) = rows(tmp_path)
    assert (row["step"], row["epoch"], {name: row[name] for name in "abcd"}) == (
        1,
        0,
        {"a": None, "b": None, "c": None, "d": 1.0},
    )
    assert row["nonfinite"] == {"a": "nan", "b": "inf", "c": "-inf"}


@pytest.mark.parametrize("start", [3, None])
def test_a_truncated_line_is_removed(tmp_path: Path, start: int | None) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'\xff\xfe\n[1]\n{"epoch": 1}\n' * (start is not None)
        + b"".join(b'{"step": %d, "epoch": 0}\n' % step for step in (1, 2, 3))
        + b'{"step": 4, "epo'
    )
    logger = JsonlLogger(run_dir=RunDir(tmp_path))
    if start is not None:
        logger.start(info(start))
    logger.log({"train/loss": 0.5}, step=4, epoch=0)
    logger.close()
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]


# TensorBoard


def test_texts_are_code_blocks_at_their_steps(tmp_path: Path) -> None:
    logger = TensorBoardLogger(run_dir=RunDir(tmp_path))
    logger.log({"config": Text("model:\n  _target_: x\n\ntask: '```'\n")}, step=30, epoch=0)
    logger.log({"restart/attempt": 1}, step=30, epoch=0)
    logger.start(info(30))
    logger.log({"note": Text("a *b*")}, step=37, epoch=0)
    logger.close()
    assert texts(tmp_path, "config") == ["    model:\n      _target_: x\n    \n    task: '```'\n"]
    assert texts(tmp_path, "note") == ["    a *b*"]
    assert [event.step for event in results.events(tmp_path).Tensors("config/text_summary")] == [30]
    assert [event.step for event in results.events(tmp_path).Tensors("note/text_summary")] == [37]


def test_charts_show_the_numbers_that_exist(tmp_path: Path) -> None:
    logger = TensorBoardLogger(run_dir=RunDir(tmp_path))
    logger.start(info(0))
    for step, name in enumerate(("train/loss", "train/gan/loss", "train/lr/head", "val/accuracy", "skew/rank_0"), 1):
        logger.log({name: 0.5, "unknown": 0.1}, step=step, epoch=0)
        logger.flush()
    logger.close()
    layouts = [
        layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
        for event in results.events(tmp_path).Tensors("custom_scalars__config__")
    ]
    titles = []
    for layout in layouts:
        charts = chain.from_iterable(category.chart for category in layout.category)
        titles.append([chart.title for chart in charts])
    assert titles[0] == ["loss"]
    assert titles[-1] == ["loss", "validation", "learning rate", "skew: own time beyond the other ranks', of a step"]
    # A title is written as soon as a chart is added, not at each log.
    assert len(titles) == 4


def test_a_full_disk_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A flush comes with each checkpoint and evaluation. The thread that SummaryWriter loses prints no traceback."""
    logger = TensorBoardLogger(run_dir=RunDir(tmp_path))
    logger.start(info(0))
    for step in range(1, 10):
        with full_at(10**6 if step not in (4, 5, 6, 7) else 5):
            logger.log({"train/loss": float(step)}, step=step, epoch=0)
            if step % 2 == 0:
                logger.flush()
    logger.close()
    shown = sorted(step for step, _ in of_events(tmp_path)["train/loss"])
    assert [step for step in shown if step != 3] == [1, 2, 9], "step 3 may have been flushed or not"
    printed = capsys.readouterr()
    refused, again = printed.out.splitlines()
    assert refused.startswith(f"{tmp_path} can't be written: File too large")
    assert again == f"{tmp_path} is writable again"
    assert printed.err == ""


def test_importing_loggers_loads_no_large_library() -> None:
    program = "import sys, framework.loggers; sys.exit(bool({'torch', 'tensorboard', 'rich'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
