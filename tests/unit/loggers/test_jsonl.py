from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from framework.loggers import JsonlLogger
from framework.run_dir import RunDir
from framework.types import FitInfo

OPTIMIZER: Any = None  # nothing here looks at it


def info(start_step: int) -> FitInfo:
    return FitInfo(
        nn.Identity(), start_step, total_steps=None, steps_per_epoch=10, max_epochs=None, optimizer=OPTIMIZER
    )


def rows(path: Path) -> list[dict[str, Any]]:
    """The lines, each of which has to be JSON as the standard has it."""
    text = (path / "metrics.jsonl").read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


def log(path: Path, *, start: int, steps: range, fit: bool = True) -> None:
    logger = JsonlLogger(run_dir=RunDir(path))
    if fit:
        logger.fit_start(info(start))
    for step in steps:
        logger.metrics({"train/loss": 1.0 / step}, step=step, epoch=step // 10)
    logger.close()
    logger.close()


def test_lines_that_come_fast_wait_a_little_but_for_an_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [50.0]
    monkeypatch.setattr("framework.loggers.pace.monotonic", lambda: now[0])
    logger = JsonlLogger(run_dir=RunDir(tmp_path))
    logger.fit_start(info(0))

    def there(step: int, name: str = "train/loss", *, at: float) -> list[int]:
        now[0] = at
        logger.metrics({name: 0.5}, step=step, epoch=0)
        return [row["step"] for row in rows(tmp_path)]

    assert there(1, at=50.0) == [1]
    assert there(2, at=50.09) == [1]
    assert there(3, at=50.1) == [1, 2, 3]
    assert there(4, at=50.11) == [1, 2, 3]
    assert there(4, "val/loss", at=50.12) == [1, 2, 3, 4, 4]
    assert there(5, at=50.13) == [1, 2, 3, 4, 4]
    logger.flush()
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 4, 5]
    logger.metrics({"train/loss": 0.5, "train/odd": object()}, step=6, epoch=0)  # type: ignore[dict-item]
    with pytest.raises(TypeError):
        logger.flush()
    logger.close()  # it isn't told twice, and nothing is there twice
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 4, 5]


def test_one_object_each_call_the_first_of_which_is_there_at_once(tmp_path: Path) -> None:
    logger = JsonlLogger(run_dir=RunDir(tmp_path))
    logger.fit_start(info(0))
    logger.text("config", "a: 1")
    before = time.time()
    logger.metrics({"train/loss": 0.1 + 0.2, "lr": 0.01}, step=5, epoch=1)
    (row,) = rows(tmp_path)
    assert abs(row.pop("time") - before) < 10
    assert row == {"step": 5, "epoch": 1, "train/loss": 0.1 + 0.2, "lr": 0.01}
    logger.close()


def test_what_is_not_finite_is_null_and_told(tmp_path: Path) -> None:
    logger = JsonlLogger(run_dir=RunDir(tmp_path))
    logger.metrics({"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0}, step=1, epoch=0)
    logger.close()
    (row,) = rows(tmp_path)
    assert {name: row[name] for name in "abcd"} == {"a": None, "b": None, "c": None, "d": 1.0}
    assert row["nonfinite"] == {"a": "nan", "b": "inf", "c": "-inf"}


def test_a_resumed_run_has_every_step_once(tmp_path: Path) -> None:
    log(tmp_path, start=0, steps=range(1, 8))
    log(tmp_path, start=5, steps=range(6, 10))
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, 10))
    log(tmp_path, start=0, steps=range(1, 3))
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]


def test_a_line_that_a_kill_left_unfinished_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log(tmp_path, start=0, steps=range(1, 4))
    for fit in (True, False):
        path.write_text(path.read_text() + '{"step": 4, "epo')
        log(tmp_path, start=3, steps=range(4, 5), fit=fit)
        assert [row["step"] for row in rows(tmp_path)] == ([1, 2, 3, 4] if fit else [1, 2, 3, 4, 4])
    path.write_bytes(b'\xff\xfe\n[1]\n{"epoch": 1}\n' + path.read_bytes())
    log(tmp_path, start=3, steps=range(4, 5))
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]


def test_an_evaluation_alone_appends(tmp_path: Path) -> None:
    log(tmp_path, start=0, steps=range(1, 4))
    logger = JsonlLogger(run_dir=RunDir(tmp_path))
    logger.metrics({"test/accuracy": 1.0}, step=2, epoch=0)
    logger.close()
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 2]


def test_nothing_logged_leaves_no_file_behind(tmp_path: Path) -> None:
    JsonlLogger(run_dir=RunDir(tmp_path)).close()
    assert list(tmp_path.iterdir()) == []


def test_what_the_step_gone_on_from_has_is_not_written_again(tmp_path: Path) -> None:
    log(tmp_path, start=0, steps=range(1, 4))
    logger = JsonlLogger(run_dir=RunDir(tmp_path))
    logger.fit_start(info(3))
    logger.metrics({"train/loss": 0.5}, step=3, epoch=0)
    logger.metrics({"train/loss": 0.5, "test/accuracy": 1.0}, step=3, epoch=0)
    logger.metrics({"train/loss": 0.25}, step=4, epoch=0)
    logger.close()
    found = [
        {name: row[name] for name in ("step", "train/loss", "test/accuracy") if name in row} for row in rows(tmp_path)
    ]
    assert found[2:] == [
        {"step": 3, "train/loss": 1 / 3},
        {"step": 3, "test/accuracy": 1.0},
        {"step": 4, "train/loss": 0.25},
    ]
