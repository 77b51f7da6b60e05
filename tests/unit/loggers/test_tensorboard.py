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


def info(start_step: int) -> FitInfo:
    return FitInfo(nn.Identity(), start_step=start_step, total_steps=None, steps_per_epoch=10, max_epochs=None)


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
