"""Ranks that disagree about a collective: the report of the time-out names it, and the line of each rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from framework import StepOutput

pytestmark = [pytest.mark.multiproc, pytest.mark.usefixtures("own_state")]

TWO = ("recipe=toy", "topology.procs_per_node=2", "trainer.max_steps=6", "backend.timeout=3s", "checkpoint=none")
NO_EVALUATION = ("trainer.limit_val_batches=0", "trainer.limit_test_batches=0")


class Exchanges:
    """Exchanges seven numbers in each step, but in the third one rank 1 does something else."""

    def __init__(self, instead: str) -> None:
        self.instead = instead
        self.steps = 0

    def training_step(self, model: Any, batch: Any) -> StepOutput:
        self.steps += 1
        differs = self.steps == 3 and os.environ["RANK"] == "1"
        if not differs:
            dist.all_reduce(torch.ones(7))
        elif self.instead == "sleeps":
            time.sleep(600)
        x, y = batch
        return StepOutput(torch.nn.functional.mse_loss(model(x), y), len(x))


def line_of(text: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, start=1) if line.strip() == text]
    return f"{__file__}:{number}"


def disagreement(train: Callable[..., Path], instead: str) -> tuple[Path, str]:
    task = ("~task", f"+task._target_={__name__}.Exchanges", f"+task.instead={instead}")
    run = train(*TWO, *NO_EVALUATION, *task, status=1)
    report = json.loads((run / "failure.json").read_text())
    (difference,) = report["collectives"]
    return run, difference


def test_a_skipped_collective_is_named(train: Callable[..., Path], capfd: pytest.CaptureFixture[str]) -> None:
    # gloo aborts the rank that receives more than seven numbers.
    _, difference = disagreement(train, "skipped")
    first, second = difference.split("; ")
    assert first.endswith(f": rank 0 calls all_reduce of Float [7] at {line_of('dist.all_reduce(torch.ones(7))')}")
    # That of the gradients.
    assert second.startswith("rank 1 calls all_reduce of Float [165] at ")
    printed = " ".join(capfd.readouterr().err.split())
    shown = difference.replace(f"{Path.cwd()}/", "")
    assert f"calls {shown} try Look for what differs between ranks" in printed
    assert "stack all_reduce at " in printed


@pytest.mark.exhaustive
def test_a_rank_that_leaves_is_named(train: Callable[..., Path]) -> None:
    # The others' wait times out.
    run, difference = disagreement(train, "sleeps")
    exchange = f"all_reduce of Float [7] at {line_of('dist.all_reduce(torch.ones(7))')}"
    assert difference.endswith(f": rank 0 calls {exchange}; rank 1 never calls it")
    # torch's own command reads the same files.
    options = ("-p", "collectives_attempt_0_rank_")
    command = (sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(run / "logs"), *options)
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stderr
    assert "Not all ranks joining collective" in printed
    assert "missing ranks: {1}" in printed


@pytest.mark.exhaustive
def test_dumps_of_an_earlier_start_are_not_compared(train: Callable[..., Path]) -> None:
    short = ("recipe=toy", "topology.procs_per_node=2", "trainer.max_steps=1", "checkpoint.monitor=null")
    run = train(*short, *NO_EVALUATION)
    earlier = run / "logs" / "collectives_attempt_0_rank_1"
    earlier.write_bytes(b"")
    train(f"resume={run}", "trainer.max_steps=2")
    assert not earlier.exists()
