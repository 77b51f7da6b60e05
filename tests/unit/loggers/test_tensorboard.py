from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from framework.loggers import TensorBoardLogger
from framework.run_dir import RunDir
from framework.types import FitInfo

OPTIMIZER: Any = None  # nothing here looks at it


def info(start_step: int) -> FitInfo:
    return FitInfo(
        nn.Identity(), start_step, total_steps=None, steps_per_epoch=10, max_epochs=None, optimizer=OPTIMIZER
    )


def read(path: Path) -> EventAccumulator:
    events = EventAccumulator(str(path / "tensorboard"), size_guidance={"tensors": 0, "scalars": 0})
    events.Reload()
    return events


def scalars(path: Path, name: str) -> list[tuple[int, Any]]:
    return [(event.step, pytest.approx(event.value)) for event in read(path).Scalars(name)]


def texts(path: Path, tag: str) -> list[str]:
    return [event.tensor_proto.string_val[0].decode() for event in read(path).Tensors(f"{tag}/text_summary")]


def test_scalars_bear_the_names_they_come_with(tmp_path: Path) -> None:
    logger = TensorBoardLogger(run_dir=RunDir(tmp_path))
    logger.fit_start(info(0))
    logger.metrics({"train/loss": 0.5, "lr": 0.1}, step=1, epoch=0)
    logger.metrics({"train/loss": 0.25, "lr": 0.2}, step=2, epoch=0)
    logger.metrics({"val/accuracy": 0.75}, step=2, epoch=0)
    logger.close()
    assert scalars(tmp_path, "train/loss") == [(1, 0.5), (2, 0.25)]
    assert scalars(tmp_path, "lr") == [(1, 0.1), (2, 0.2)]
    assert scalars(tmp_path, "val/accuracy") == [(2, 0.75)]
    assert sorted(read(tmp_path).Tags()["scalars"]) == ["lr", "train/loss", "val/accuracy"]


def test_an_evaluation_is_on_the_disk_at_once_and_close_ends_the_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    logger = TensorBoardLogger(run_dir=RunDir(tmp_path))
    logger.fit_start(info(0))
    logger.metrics({"train/loss": 0.5}, step=1, epoch=0)
    logger.metrics({"val/loss": 0.5}, step=1, epoch=0)
    assert scalars(tmp_path, "val/loss") == [(1, 0.5)]
    assert scalars(tmp_path, "train/loss") == [(1, 0.5)]
    logger.close()
    logger.close()
    assert set(threading.enumerate()) == before


def test_points_that_come_fast_wait_a_little_and_keep_their_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("framework.loggers.pace.monotonic", lambda: now[0])
    monkeypatch.setattr("framework.loggers.events.time.time", lambda: now[0])
    logger = TensorBoardLogger(run_dir=RunDir(tmp_path))
    logger.fit_start(info(0))

    def log(step: int, *, at: float) -> list[int]:
        now[0] = at
        values = {"train/loss": step / 4, "train/lr": 0.1}
        logger.metrics(values, step=step, epoch=0)
        values["train/loss"] = 0.0  # what the caller makes of it later is nobody's point
        return [event.step for event in read(tmp_path).Scalars("train/loss")]

    assert log(1, at=1000.0) == [1]  # nothing came before it
    assert log(2, at=1000.02) == [1]
    assert log(3, at=1000.09) == [1]
    assert log(4, at=1000.1) == [1, 2, 3, 4]
    assert log(5, at=1000.15) == [1, 2, 3, 4]
    logger.text("note", "here")
    assert [event.step for event in read(tmp_path).Scalars("train/lr")] == [1, 2, 3, 4, 5]
    assert [event.value for event in read(tmp_path).Scalars("train/loss")] == [0.25, 0.5, 0.75, 1.0, 1.25]
    assert [event.wall_time for event in read(tmp_path).Scalars("train/loss")] == [
        1000.0,
        1000.02,
        1000.09,
        1000.1,
        1000.15,
    ]
    logger.close()


def test_a_resumed_run_shows_every_step_once(tmp_path: Path) -> None:
    for start, end in ((0, 8), (5, 7), (6, 10)):
        logger = TensorBoardLogger(run_dir=RunDir(tmp_path))
        logger.text("config", f"start: {start}")
        logger.fit_start(info(start))
        for step in range(start + 1, end + 1):
            logger.metrics({"train/loss": 100.0 * start + step}, step=step, epoch=0)
        logger.metrics({f"only/from_{start}": 1.0}, step=end, epoch=0)
        logger.close()
    expected = (
        [(step, float(step)) for step in range(1, 6)] + [(6, 506.0)] + [(step, 600.0 + step) for step in range(7, 11)]
    )
    assert scalars(tmp_path, "train/loss") == expected
    assert [read(tmp_path).Scalars(f"only/from_{start}") for start in (0, 5)] == [[], []]
    assert texts(tmp_path, "config") == ["    start: 0", "    start: 5", "    start: 6"]


def test_a_run_that_begins_anew_shows_every_step_once_and_numbers_from_before_it_begins(tmp_path: Path) -> None:
    for attempt, end in enumerate((8, 5)):
        logger = TensorBoardLogger(run_dir=RunDir(tmp_path))
        if attempt:
            logger.text("restart", "again")
            logger.metrics({"restart/attempt": attempt}, step=0, epoch=0)
        logger.fit_start(info(0))
        for step in range(1, end + 1):
            logger.metrics({"train/loss": 100.0 * attempt + step}, step=step, epoch=0)
        logger.close()
    assert scalars(tmp_path, "train/loss") == [(step, 100.0 + step) for step in range(1, 6)]
    assert scalars(tmp_path, "restart/attempt") == [(0, 1.0)]
    assert texts(tmp_path, "restart") == ["    again"]


def test_a_text_before_the_first_numbers_bears_their_step(tmp_path: Path) -> None:
    logger = TensorBoardLogger(run_dir=RunDir(tmp_path))
    logger.text("restart", "again")
    logger.metrics({"restart/attempt": 1}, step=30, epoch=0)
    logger.fit_start(info(30))
    logger.close()
    assert [event.step for event in read(tmp_path).Tensors("restart/text_summary")] == [30]


def test_texts_are_code_blocks(tmp_path: Path) -> None:
    logger = TensorBoardLogger(run_dir=RunDir(tmp_path))
    logger.text("config", "model:\n  _target_: x\n\ntask: '```'\n")
    logger.fit_start(info(0))
    logger.text("note", "a *b*")
    logger.close()
    assert texts(tmp_path, "config") == ["    model:\n      _target_: x\n    \n    task: '```'\n"]
    assert texts(tmp_path, "note") == ["    a *b*"]


def test_without_training_it_writes_too(tmp_path: Path) -> None:
    logger = TensorBoardLogger(run_dir=RunDir(tmp_path))
    logger.text("config", "a: 1")
    logger.metrics({"test/loss": 2.0}, step=30, epoch=2)
    logger.close()
    assert scalars(tmp_path, "test/loss") == [(30, 2.0)]
    assert texts(tmp_path, "config") == ["    a: 1"]
    logger = TensorBoardLogger(run_dir=RunDir(tmp_path / "texts_only"))
    logger.text("config", "b: 2")
    logger.close()
    assert texts(tmp_path / "texts_only", "config") == ["    b: 2"]


def test_nothing_logged_leaves_no_file_behind(tmp_path: Path) -> None:
    TensorBoardLogger(run_dir=RunDir(tmp_path)).close()
    assert list(tmp_path.iterdir()) == []


def test_importing_the_loggers_loads_neither_torch_nor_tensorboard_nor_rich() -> None:
    program = "import sys, framework.loggers; sys.exit(bool({'torch', 'tensorboard', 'rich'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_what_the_step_gone_on_from_has_is_not_written_again(tmp_path: Path) -> None:
    for start in (0, 3):
        logger = TensorBoardLogger(run_dir=RunDir(tmp_path))
        logger.fit_start(info(start))
        if start == 0:
            logger.metrics({"train/loss": 0.5, "test/a": 1.0}, step=3, epoch=0)
        else:
            logger.metrics({"test/a": 1.0, "test/b": 2.0}, step=3, epoch=0)
            logger.metrics({"train/loss": 0.25}, step=4, epoch=0)
        logger.close()
    events = read(tmp_path)
    shown = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert shown == {"train/loss": [(3, 0.5), (4, 0.25)], "test/a": [(3, 1.0)], "test/b": [(3, 2.0)]}


def test_what_was_flushed_outlives_a_kill(tmp_path: Path) -> None:
    """Points that come fast wait a little; a checkpoint that counts must not be ahead of them."""
    logger = TensorBoardLogger(run_dir=RunDir(tmp_path))
    logger.flush()  # nothing is open yet
    logger.fit_start(info(0))
    logger.metrics({"train/loss": 0.5}, step=2, epoch=0)
    logger.metrics({"train/loss": 0.5}, step=3, epoch=0)
    logger.flush()
    assert [event.step for event in read(tmp_path).Scalars("train/loss")] == [2, 3]
    logger.close()


def test_curves_of_ranks_are_put_into_charts_where_there_are_some(tmp_path: Path) -> None:
    for start, name in ((0, "train/loss"), (2, "skew/rank_0"), (4, "skew/worst")):
        logger = TensorBoardLogger(run_dir=RunDir(tmp_path))
        logger.fit_start(info(start))
        for step in (start + 1, start + 2):
            logger.metrics({name: 0.5, "time/data": 0.1}, step=step, epoch=0)
        logger.close()
        if start == 0:
            assert "custom_scalars__config__" not in read(tmp_path).Tags()["tensors"]
    # Once for each beginning; the page takes one.
    assert len(read(tmp_path).Tensors("custom_scalars__config__")) in (1, 2)
    assert scalars(tmp_path, "skew/rank_0") == [(3, 0.5), (4, 0.5)]
