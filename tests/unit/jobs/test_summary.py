"""What is printed at the start and the end of a run: the facts, wherever they are on the page."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from framework.config.parse import parse
from framework.errors import EXIT_STOPPED
from framework.jobs.summary import announcement, closing_of_training, interruption
from framework.run_dir import RunDir, create_run_dir
from framework.slow_ranks import SlowRank
from framework.topology import Topology
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
    return " ".join(closing_of_training(parse(raw_config()), run_dir, status).split())


@pytest.mark.parametrize(
    ("topology", "text"),
    [
        (Topology(1, 1, 0, 1), "1 process, CPU"),
        (Topology(1, 4, 0, 2), "4 processes, CPU"),
        (Topology(1, 1, 1, 1), "1 process, 1 GPU"),
        (Topology(1, 4, 8, 2), "4 processes, 8 GPUs"),
    ],
)
def test_a_start_says_what_runs_where(run_dir: RunDir, topology: Topology, text: str) -> None:
    expected = f"Training some: {text}\noutputs/some/{run_dir.path.name}"
    assert announcement("Training", "some", topology, run_dir) == expected


def test_a_start_names_options_that_replace_the_recipes_own(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    replaced = {"model=toy": "cnn", "optimizer=adam": "sgd"}
    text = announcement("Training", "some", Topology(1, 1, 0, 1), run_dir, replaced=replaced)
    assert "(model=toy instead of cnn, optimizer=adam instead of sgd)" in text
    assert text.endswith(f"\n{run_dir.path.absolute()}")


def test_a_finished_run_shows_its_results_and_where_they_are(run_dir: RunDir) -> None:
    last = {"step": 1100, "metrics": {"val/loss": 0.123456}}
    tested = {"step": 1200, "metrics": {"test/accuracy": 1.0}}
    assert "tensorboard" not in closing(run_dir, 0, ENDED)
    write_small(run_dir.checkpoints, 1200)
    run_dir.tensorboard.mkdir()
    text = closing(run_dir, 0, {**ENDED, "best": None, "last": last, "test": tested})
    path = f"outputs/some/{run_dir.path.name}"
    for fact in (
        *("1,200 steps", "3.2 s", "trainer.max_epochs reached", "last (step 1,100)", "(step 1,200)"),
        *("val/loss 0.1235 –", "test/accuracy – 1.0000", f"{path}/checkpoints", f"{path}/logs"),
        *(f"python -m framework resume={path}", "tensorboard --logdir outputs"),
    ):
        assert fact in text


@pytest.mark.parametrize(
    ("last_step", "facts"),
    [
        (9, ["best (step 7) last (step 9)", "val/accuracy 0.9889 0.9833", "test/accuracy 0.9750 –"]),
        (7, ["best and last (step 7)", "val/accuracy 0.9889 test", "test/accuracy 0.9750"]),
    ],
)
def test_the_best_and_the_last_validation_have_a_column_each(run_dir: RunDir, last_step: int, facts: list[str]) -> None:
    results = {
        "best": {"step": 7, "metrics": {"val/accuracy": 0.9889}},
        "last": {"step": last_step, "metrics": {"val/accuracy": 0.9833 if last_step == 9 else 0.9889}},
        "test": {"step": 7, "metrics": {"test/accuracy": 0.975}},
    }
    text = closing(run_dir, 0, results)
    assert [fact for fact in facts if fact not in text] == []


def test_the_slowest_rank_is_named(run_dir: RunDir) -> None:
    slow = SlowRank(3, "node1, cuda:3", "data", 0.18, 1, 900, throughout=True)
    less = SlowRank(1, "node0, cuda:1", "compute", 0.11, 301, 900, throughout=False)
    text = closing(run_dir, 0, {"steps": 900, "slow_ranks": [slow.to_plain(), less.to_plain()]})
    assert "rank 3 (node1, cuda:3) is 18 % slower in data" in text
    assert "rank 1" not in text
    assert "slower" not in closing(run_dir, 0, {"steps": 900, "slow_ranks": []})


def test_a_stopped_run_says_where_and_a_failed_one_shows_no_results(run_dir: RunDir) -> None:
    text = closing(run_dir, EXIT_STOPPED, {**ENDED, "ended_by": "stopped on request (SIGTERM)"})
    assert "Stopped some on request (SIGTERM) after step 1,200, which is saved" in text
    text = closing(run_dir, 1, {"steps": 5, "last": {"step": 5, "metrics": {"val/loss": 1.0}}})
    assert "Finished" not in text
    assert "val/loss" not in text
    assert "logs" in text


@pytest.mark.parametrize("status", [0, 1, EXIT_STOPPED])
def test_resuming_is_offered_only_with_a_complete_checkpoint(run_dir: RunDir, status: int) -> None:
    (run_dir.checkpoints / "step_00000010").mkdir(parents=True)  # one that was being written
    command = f"python -m framework resume=outputs/some/{run_dir.path.name}"
    assert "resume" not in closing(run_dir, status)
    assert "No checkpoint yet" in interruption(run_dir)
    write_small(run_dir.checkpoints, 20)
    assert command in closing(run_dir, status)
    assert "No checkpoint yet" not in interruption(run_dir)
    assert interruption(run_dir).endswith(command)


def test_commands_work_where_they_are_printed(run_dir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = run_dir.path.parents[1].rename(tmp_path / "my, outputs")
    moved = RunDir(outputs / "some" / run_dir.path.name)
    write_small(moved.checkpoints, 20)
    moved.tensorboard.mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    words = shlex.split(closing(moved, 1))
    assert f"resume='{moved.path}'" in words
    assert words[words.index("--logdir") + 1] == str(outputs)
