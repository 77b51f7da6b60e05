"""The terminal: progress, evaluations, and outputs that are no terminal."""

from __future__ import annotations

import os
import pty
import re
import sys
import threading
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


def test_a_pipe_gets_a_line_every_few_seconds_and_one_for_each_evaluation(
    clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = started()
    for step in range(1, 26):
        clock.now_s += 0.5
        logger.step(report(step))
        values = {"train/loss": 1.0 / step, "train/lr": 0.1, "train/grad_norm": 3.0}
        logger.metrics(values, step=step, epoch=(step - 1) // 10)
    first, second = capsys.readouterr().out.splitlines()
    for line, facts in (
        (first, ["epoch 0/9", "step 10/100", "2 steps/s", "ETA 0:00:45", "loss 0.1111", "lr 0.1"]),
        (second, ["epoch 1/9", "step 20/100", "2 steps/s", "ETA 0:00:40", "loss 0.05263"]),
    ):
        assert [fact for fact in facts if fact not in line] == []
    logger.metrics({"val/loss": 0.25, "val/accuracy": 0.9712345}, step=25, epoch=2)
    assert "step 25  val/loss 0.25 val/accuracy 0.9712" in capsys.readouterr().out
    logger.close()
    assert "step 25/100  2 steps/s  ETA 0:00:38" in capsys.readouterr().out
    logger.close()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("keywords", "line"),
    [
        ({"total_steps": None, "max_epochs": None}, "epoch 4  step 44  4 steps/s"),
        ({"start_step": 40}, "epoch 4/9  step 44/100  0.3636 steps/s"),
    ],
)
def test_runs_by_steps_or_without_end_and_resumed_ones(
    clock: SimpleNamespace, capsys: pytest.CaptureFixture[str], keywords: dict[str, Any], line: str
) -> None:
    logger = started(**keywords)
    clock.now_s += 11
    logger.step(report(44))
    assert capsys.readouterr().out.startswith(line)
    logger.close()


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, *, term: str) -> str:
    """What a terminal of 120 columns gets of a short training."""
    master, slave = pty.openpty()
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
    for name, value in (("TERM", term), ("COLUMNS", "120"), ("LINES", "30")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    with os.fdopen(slave, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        logger = started()
        for step in range(1, 101):
            logger.step(report(step))
        logger.metrics({"train/loss": 0.0025, "train/lr": 0.5}, step=100, epoch=9)
        logger.metrics({"val/accuracy": 0.875}, step=100, epoch=9)
        print("said in between")
        logger.close()
        assert sys.stdout is terminal
        print("after")
    reader.join(timeout=30)
    os.close(master)
    return b"".join(output).decode()


@pytest.mark.usefixtures("own_state")  # rich draws random numbers when it is loaded
def test_a_terminal_shows_one_line_that_is_redrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    text = on_a_terminal(monkeypatch, term="xterm-256color")
    assert text.index("\x1b[?25l") < text.index("\x1b[?25h")  # the cursor is hidden, and shown again
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n")
    assert re.search(r"epoch 9/9  step 100/100  \S+ steps/s  ETA 0:00:00  loss 0.0025 lr 0.5", plain)
    assert plain.index("said in between") < plain.index("after")


def test_a_terminal_that_cannot_redraw_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    text = on_a_terminal(monkeypatch, term="dumb")
    assert "\x1b[" not in text
    assert "step 100  val/accuracy 0.875" in text
