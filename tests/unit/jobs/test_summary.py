"""What is printed at the start and the end of a run: the facts, wherever they are on the page."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from framework.errors import EXIT_STOPPED
from tests.helpers.internals import (
    RunDir,
    SlowRank,
    Topology,
    create_run_dir,
    interrupted_message,
    parse,
    start_message,
    stopped_message,
    training_summary,
    unused_variables,
)
from tests.unit.checkpoint.states import write_small
from tests.unit.config.raw import raw_config

ENDED = {"steps": 1200, "seconds": 3.25, "ended_by": "trainer.max_epochs reached"}


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.chdir(tmp_path)
    return create_run_dir(Path("outputs", "some"))


def closing(run_dir: RunDir, status: int, results: Mapping[str, Any] | None = None) -> str:
    """The words printed at the end, one space apart."""
    run_dir.update_run({"results": dict(results or {})})
    return " ".join(training_summary(parse(raw_config()), run_dir, status).split())


def test_a_start_says_what_runs_where(run_dir: RunDir) -> None:
    text = start_message("Training", "some", Topology(1, 4, 8, 2), run_dir)
    assert ("4 processes, 8 GPUs" in text, run_dir.path.name in text) == (True, True)
    assert "1 process, CPU" in start_message("Training", "some", Topology(1, 1, 0, 1), run_dir)


@pytest.mark.parametrize(
    ("status", "results", "facts"),
    [
        (0, ENDED, ["1,200 steps", "3.2 s", "trainer.max_epochs reached", "logs"]),
        (
            0,
            {
                "best": {"step": 7, "metrics": {"val/accuracy": 0.9889}},
                "last": {"step": 9, "metrics": {"val/accuracy": 0.9833}},
                "test": {"step": 7, "metrics": {"test/accuracy": 0.975}},
            },
            ["best (step 7) last (step 9)", "val/accuracy 0.9889 0.9833", "test/accuracy 0.9750 –"],
        ),
        (
            EXIT_STOPPED,
            ENDED | {"ended_by": "stopped on request (SIGTERM)"},
            ["Stopped some on request (SIGTERM) after step 1,200, which is saved"],
        ),
    ],
    ids=["finished", "best and last", "stopped"],
)
def test_how_a_run_ended(run_dir: RunDir, status: int, results: dict[str, Any], facts: list[str]) -> None:
    text = closing(run_dir, status, results)
    assert [fact for fact in facts if fact not in text] == []
    # There are no curves.
    assert "tensorboard" not in text


def test_a_failed_run_shows_logs_and_no_results(run_dir: RunDir) -> None:
    text = closing(run_dir, 1, {"steps": 5, "last": {"step": 5, "metrics": {"val/loss": 1.0}}})
    assert "Finished" not in text
    assert "val/loss" not in text
    assert "logs" in text


def test_the_slowest_rank_is_named(run_dir: RunDir) -> None:
    slow = SlowRank(3, "node1, cuda:3", "data", 0.18, 1, 900, throughout=True)
    less = SlowRank(1, "node0, cuda:1", "compute", 0.11, 301, 900, throughout=False)
    text = closing(run_dir, 0, {"steps": 900, "slow_ranks": [asdict(slow), asdict(less)]})
    assert "rank 3 (node1, cuda:3) is 18 % slower in data" in text
    assert "rank 1" not in text


def test_resuming_is_offered_only_with_a_complete_checkpoint(run_dir: RunDir) -> None:
    # This checkpoint was being written.
    (run_dir.checkpoints / "step_00000010").mkdir(parents=True)
    command = f"python -m framework resume=outputs/some/{run_dir.path.name}"
    assert "resume" not in closing(run_dir, 1)
    assert "No checkpoint yet" in interrupted_message(run_dir, trains=True)
    write_small(run_dir.checkpoints, 20)
    assert all(command in closing(run_dir, status) for status in (0, 1, EXIT_STOPPED))
    assert "No checkpoint yet" not in interrupted_message(run_dir, trains=True)
    assert command in interrupted_message(run_dir, trains=True)
    assert command in stopped_message(run_dir, by="SIGTERM", trains=True)
    for message in (interrupted_message(run_dir, trains=False), stopped_message(run_dir, by="SIGTERM", trains=False)):
        assert "Nothing to resume" in message
        assert "resume=" not in message


def test_commands_work_where_they_are_printed(run_dir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = run_dir.path.parents[1].rename(tmp_path / "my, outputs")
    moved = RunDir(outputs / "some" / run_dir.path.name)
    write_small(moved.checkpoints, 20)
    (moved.path / "events.out.tfevents.1.host").touch()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    words = shlex.split(closing(moved, 1))
    assert f"resume='{moved.path}'" in words
    assert words[words.index("--logdir") + 1] == str(outputs)


def test_variables_that_decide_nothing_are_named() -> None:
    set_variables = {"MASTER_PORT": "29500", "HOME": "/root"}
    assert unused_variables(set_variables, Topology(1, 2, 0, 1)).startswith("Not used: MASTER_PORT=29500.")
    assert "topology.rdzv_endpoint" in unused_variables(set_variables, Topology(2, 2, 0, 1))
    assert unused_variables({"HOME": "/root"}, Topology(1, 2, 0, 1)) == ""
