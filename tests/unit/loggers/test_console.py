from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from framework.loggers import ConsoleLogger, console
from framework.types import FitInfo, StepReport

LOSS = torch.zeros((), device="meta")
"""A loss nobody can read: what looks at its value fails."""


def info(*, start_step: int = 0, total_steps: int | None = 100, max_epochs: int | None = 10) -> FitInfo:
    optimizer: Any = None  # nothing here looks at it
    return FitInfo(nn.Identity(), start_step, total_steps, 10, max_epochs, optimizer)


def report(step: int) -> StepReport:
    return StepReport(step, (step - 1) // 10, LOSS, 8)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now_s=1000.0)
    monkeypatch.setattr(console, "monotonic", lambda: clock.now_s)
    return clock


def started(**keywords: Any) -> ConsoleLogger:
    logger = ConsoleLogger()
    logger.fit_start(info(**keywords))
    return logger


def test_a_full_disk_that_the_output_goes_to_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w", buffering=1) as full:
        monkeypatch.setattr(sys, "stdout", full)
        logger = started()
        logger.step(report(1))
        logger.metrics({"val/loss": 0.25}, step=1, epoch=0)
        logger.close()
        monkeypatch.undo()
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), full.fileno())  # for what is left to be written


def test_on_a_pipe_there_is_a_line_every_few_seconds_and_one_each_evaluation(
    clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = started()
    assert capsys.readouterr().out == ""
    for step in range(1, 26):
        clock.now_s += 0.5
        logger.step(report(step))
        logger.metrics(
            {"train/loss": 1.0 / step, "train/lr": 0.1, "train/grad_norm": 3.0}, step=step, epoch=(step - 1) // 10
        )
    assert capsys.readouterr().out.splitlines() == [
        "epoch 0/9  step 10/100  2 steps/s  ETA 0:00:45  loss 0.1111 lr 0.1",
        "epoch 1/9  step 20/100  2 steps/s  ETA 0:00:40  loss 0.05263 lr 0.1",
    ]
    logger.metrics({"val/loss": 0.25, "val/accuracy": 0.9712345}, step=25, epoch=2)
    assert capsys.readouterr().out == "epoch 2  step 25  val/loss 0.25 val/accuracy 0.9712\n"
    logger.close()
    line = "epoch 2/9  step 25/100  2 steps/s  ETA 0:00:38  loss 0.04 lr 0.1\n"
    assert capsys.readouterr().out == line
    logger.close()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("keywords", "line"),
    [
        ({"max_epochs": None}, "epoch 4  step 44/100  4 steps/s  ETA 0:00:14"),
        ({"total_steps": None, "max_epochs": None}, "epoch 4  step 44  4 steps/s"),
        ({"start_step": 40}, "epoch 4/9  step 44/100  0.3636 steps/s"),
    ],
)
def test_runs_by_steps_or_without_end_and_resumed_ones(
    clock: SimpleNamespace,
    capsys: pytest.CaptureFixture[str],
    keywords: dict[str, Any],
    line: str,
) -> None:
    logger = started(**keywords)
    clock.now_s += 11
    logger.step(report(44))
    assert capsys.readouterr().out.startswith(line)
    logger.close()


def test_a_resumed_run_shows_where_it_stands_before_its_first_step() -> None:
    logger = started(start_step=40)
    assert logger.line() == "epoch 4/9  step 40/100"
    logger.close()


def test_without_training_only_evaluations_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    logger = ConsoleLogger()
    logger.text("config", "a: 1")
    logger.metrics({"train/loss": 1.0}, step=1, epoch=0)
    logger.metrics({"test/accuracy": 0.5, "test/loss": float("nan")}, step=30, epoch=2)
    logger.close()
    assert capsys.readouterr().out == "epoch 2  step 30  test/accuracy 0.5 test/loss nan\n"


PROGRAM = """
import sys, threading, time
from pathlib import Path
import torch
from torch import nn
from framework.loggers import ConsoleLogger
from framework.types import FitInfo, StepReport

stdout = sys.stdout
logger = ConsoleLogger()
logger.fit_start(FitInfo(nn.Identity(), 0, total_steps=400, steps_per_epoch=100, max_epochs=4, optimizer=None))
for step in range(1, 401):
    logger.step(StepReport(step, (step - 1) // 100, torch.zeros((), device="meta"), 1))
    if step % 100 == 0:
        logger.metrics({"train/loss": 1 / step, "train/lr": 0.5}, step=step, epoch=0)
    time.sleep(0.002)
logger.metrics({"val/accuracy": 0.875}, step=400, epoch=3)
print("said in between")
logger.close()
assert sys.stdout is stdout and threading.active_count() == 1
print("after")
"""


def run_on_a_terminal(*, term: str) -> str:
    """What a terminal of 120 columns gets."""
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": term, "COLUMNS": "120", "LINES": "30"}
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=slave, stderr=slave, env=environment) as process:
        os.close(slave)
        output: list[bytes] = []

        def read() -> None:
            while True:
                try:
                    data = os.read(master, 65536)
                except OSError:  # how a terminal says that nobody writes to it any more
                    return
                output.append(data)

        reader = threading.Thread(target=read)
        reader.start()
        status = process.wait(timeout=60)
        reader.join(timeout=10)
    os.close(master)
    text = b"".join(output).decode()
    assert status == 0, text
    return text


def test_on_a_terminal_one_line_is_drawn_anew() -> None:
    text = run_on_a_terminal(term="xterm-256color")
    frames = text.count("steps/s")
    assert 3 <= frames <= 10, "about four times a second, for a second"
    assert "\x1b[?25l" in text, "the cursor is hidden"
    assert "\x1b[?25h" in text, "and shown again"
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n")
    assert re.search(r"━+ +epoch 3/3  step 400/400  \S+ steps/s  ETA 0:00:00  loss 0.0025 lr 0.5", plain)
    assert plain.index("said in between") < plain.index("after")


def test_a_terminal_that_cannot_redraw_gets_plain_lines() -> None:
    text = run_on_a_terminal(term="dumb")
    assert "\x1b[" not in text
    assert "epoch 3  step 400  val/accuracy 0.875" in text
