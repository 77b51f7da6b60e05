"""The terminal: progress, evaluations, and outputs that are no terminal."""

from __future__ import annotations

import io
import os
import pty
import re
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from framework.loggers import ConsoleLogger
from framework.types import FitInfo, StepInfo
from tests.helpers.internals import ProgressMode, RunDir, Tee, console_module, show_status

LOSS = torch.zeros((), device="meta")
"""A loss nobody can read: what looks at its value fails."""


def info(*, start_step: int = 0, total_steps: int | None = 100, max_epochs: int | None = 10) -> FitInfo:
    # The logger doesn't look at it.
    optimizer: Any = None
    return FitInfo(nn.Identity(), start_step, total_steps, 10, max_epochs, optimizer)


def step_info(step: int) -> StepInfo:
    return StepInfo(step, (step - 1) // 10, LOSS, 8)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now_s=1000.0)
    monkeypatch.setattr(console_module, "monotonic", lambda: clock.now_s)
    return clock


def started(**keywords: Any) -> ConsoleLogger:
    logger = ConsoleLogger()
    logger.start(info(**keywords))
    return logger


def test_a_pipe_gets_occasional_lines(clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    logger = started()
    for step in range(1, 26):
        clock.now_s += 0.5
        logger.on_train_step_end(step_info(step))
        values = {"train/loss": 1.0 / step, "train/lr": 0.1, "train/grad_norm": 3.0}
        logger.log(values, step=step, epoch=(step - 1) // 10)
    first, second = capsys.readouterr().out.splitlines()
    for line, facts in (
        (first, ["epoch 0/9", "step 10/100", "2 steps/s", "ETA 0:00:45", "loss 0.1111", "lr 0.1"]),
        (second, ["epoch 1/9", "step 20/100", "2 steps/s", "ETA 0:00:40", "loss 0.05263"]),
    ):
        assert [fact for fact in facts if fact not in line] == []
    logger.log({"val/loss": 0.25, "val/accuracy": 0.9712345}, step=25, epoch=2)
    assert "step 25  val/loss 0.25 val/accuracy 0.9712" in capsys.readouterr().out
    logger.close()
    assert "step 25/100  2 steps/s  loss 0.04" in capsys.readouterr().out
    logger.close()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("keywords", "line"),
    [
        ({"total_steps": None, "max_epochs": None}, "epoch 4  step 44  4 steps/s"),
        ({"start_step": 40}, "epoch 4/9  step 44/100  0.3636 steps/s"),
    ],
)
def test_length_and_resume_are_shown(
    clock: SimpleNamespace, capsys: pytest.CaptureFixture[str], keywords: dict[str, Any], line: str
) -> None:
    logger = started(**keywords)
    clock.now_s += 11
    logger.on_train_step_end(step_info(44))
    assert capsys.readouterr().out.startswith(line)
    logger.close()


def on_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
    *,
    progress: ProgressMode = "auto",
    columns: int = 120,
    environment: Mapping[str, str] | None = None,
    run_dir: RunDir | None = None,
) -> str:
    """What a terminal gets of a short training."""
    master, slave = pty.openpty()
    output: list[bytes] = []

    def read() -> None:
        while True:
            try:
                data = os.read(master, 65536)
            except OSError:
                # A terminal reports in this way that nobody writes to it any more.
                return
            output.append(data)

    reader = threading.Thread(target=read)
    reader.start()
    for name in ("NO_COLOR", "FORCE_COLOR", "JPY_PARENT_PID"):
        monkeypatch.delenv(name, raising=False)
    environment = {"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "30", **(environment or {})}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    log = io.StringIO()
    with os.fdopen(slave, "w") as terminal, monkeypatch.context() as patch:
        out = Tee(terminal, log)
        patch.setattr(sys, "stdout", out)
        logger = ConsoleLogger(progress, run_dir=run_dir)
        logger.start(info())
        for step in range(1, 101):
            logger.on_train_step_end(step_info(step))
        values = {"train/loss": 0.0025, "train/lr": 0.5, "train/samples_per_s": 7.0, "device/memory_gb": 0.25}
        logger.log(values | {"skew/worst": 0.5, "skew/slowest_rank": 3.0}, step=100, epoch=9)
        logger.log({"val/accuracy": 0.875}, step=100, epoch=9)
        print("said in between")
        logger.close()
        assert sys.stdout is out
        assert out.terminal is terminal
        print("after")
    reader.join(timeout=30)
    os.close(master)
    lines = [line for line in log.getvalue().splitlines() if not line.startswith("epoch 9/9")]
    evaluation = [] if progress == "off" else [EVALUATED]
    assert lines == [*evaluation, "said in between", "after"]
    return b"".join(output).decode()


EVALUATED = "epoch 9  step 100  val/accuracy 0.875"


def last_rows(text: str) -> list[str]:
    """The rows of the live view when it was closed."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n")
    lines = [line.rstrip() for line in plain.splitlines() if line.strip()]
    assert lines.index(EVALUATED) < lines.index("said in between") < lines.index("after")
    return lines[lines.index("said in between") + 1 : lines.index("after")][-6:]


# rich draws random numbers when it is loaded.
@pytest.mark.usefixtures("own_state")
@pytest.mark.parametrize("columns", [60, 200])
def test_a_terminal_redraws_rows_below_output(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, columns: int) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last").symlink_to("step_00000090")
    text = on_a_terminal(monkeypatch, columns=columns, run_dir=RunDir(tmp_path))
    # The cursor is hidden first and shown again later.
    assert text.index("\x1b[?25l") < text.index("\x1b[?25h")
    rows = last_rows(text)
    assert max(map(len, rows)) <= columns
    for row, pattern in zip(
        rows,
        (
            r"epoch 9/9 +━+  10/10",
            r"total +━+  100/100",
            r"train +loss 0.0025  lr 0.5",
            r"evaluated +val/accuracy 0.875  at step 100",
            r"speed +\S+ steps/s  7 samples/s  skew 50% \(rank 3\)",
            r"state +memory 250 MB  saved step 90",
        ),
        strict=True,
    ):
        assert re.fullmatch(pattern, row), row


def screen(text: str) -> list[str]:
    """Return the lines of a terminal that gets a text with the control sequences of the live view."""
    lines = [""]
    row = 0
    column = 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
        if token == "\x1b[J":
            lines[row:] = [lines[row][:column]]
        elif token.startswith("\x1b") and token.endswith("A"):
            row -= int(token[2:-1])
        elif token == "\r":
            column = 0
        elif token == "\n":
            row += 1
            column = 0
            lines += [""] * (row + 1 - len(lines))
        elif not token.startswith("\x1b"):
            lines[row] = lines[row][:column] + token + lines[row][column + len(token) :]
            column += len(token)
    return [line.rstrip() for line in lines if line.strip()]


@pytest.mark.usefixtures("own_state")
def test_what_another_process_prints_stays(clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    terminal = sys.stdout
    logger = ConsoleLogger("rich")
    logger.start(info())
    for step in range(1, 4):
        clock.now_s += 1
        logger.on_train_step_end(step_info(step))
        # Past the view, as from the process that watches the ranks.
        terminal.write(f"from outside {step}\n")
        print(f"from the task {step}")
    logger.close()
    lines = screen(capsys.readouterr().out)
    assert lines[:-3] == [f"from {where} {step}" for step in (1, 2, 3) for where in ("outside", "the task")]
    assert [line.split()[0] for line in lines[-3:]] == ["epoch", "total", "speed"]
    assert "3/100" in lines[-2]


@pytest.mark.usefixtures("own_state")
def test_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    colored = r"\x1b\[[\d;]*3\dm"
    assert re.search(colored, on_a_terminal(monkeypatch))
    assert not re.search(colored, on_a_terminal(monkeypatch, environment={"NO_COLOR": "1"}))


@pytest.mark.usefixtures("own_state")
@pytest.mark.parametrize(
    ("progress", "environment"),
    [
        ("plain", {}),
        # `!python -m framework` in a notebook sets it.
        ("auto", {"JPY_PARENT_PID": "1"}),
        ("auto", {"TERM": "dumb"}),
        ("rich", {"TERM": "dumb"}),
    ],
)
def test_plain_lines_are_used_where_redrawing_fails(
    monkeypatch: pytest.MonkeyPatch, progress: ProgressMode, environment: dict[str, str]
) -> None:
    text = on_a_terminal(monkeypatch, progress=progress, environment=environment)
    assert "\x1b[" not in text
    lines = text.splitlines()
    assert lines[:2] == [EVALUATED, "said in between"]
    assert lines[2].startswith("epoch 9/9  step 100/100  ")


def test_nothing_is_printed_if_progress_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_a_terminal(monkeypatch, progress="off").splitlines() == ["said in between", "after"]


@pytest.mark.usefixtures("own_state")
def test_the_live_view_can_be_forced(capsys: pytest.CaptureFixture[str]) -> None:
    logger = ConsoleLogger("rich")
    logger.start(info())
    logger.on_train_step_end(step_info(7))
    print("said in between")
    logger.close()
    assert re.search(r"said in between.*total .*7/100", capsys.readouterr().out, re.DOTALL)


def test_a_status_line_is_replaced_by_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    master, slave = pty.openpty()
    log = io.StringIO()
    with os.fdopen(slave, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Tee(terminal, log))
        show_status("Loading the data …")
        show_status("Building the model …")
        print("model  parameters")
        sys.stdout.flush()
    output = b""
    # A terminal that nobody writes to any more can't be read.
    with suppress(OSError):
        while data := os.read(master, 65536):
            output += data
    os.close(master)
    assert screen(output.decode().replace("\x1b[K", "\x1b[J")) == ["model  parameters"]
    assert re.findall("Loading|Building|model", output.decode()) == ["Loading", "Building", "model", "model"]
    assert log.getvalue() == "model  parameters\n"
