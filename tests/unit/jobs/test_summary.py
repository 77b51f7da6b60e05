from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from framework.config.parse import parse
from framework.config.schema import Config
from framework.errors import EXIT_STOPPED
from framework.jobs.summary import announcement, closing_of_training, interruption
from framework.run_dir import RunDir, create_run_dir
from framework.slow_ranks import SlowRank
from framework.topology import Topology
from tests.unit.checkpoint.states import write_small
from tests.unit.config.raw import raw_config


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.chdir(tmp_path)
    return create_run_dir(Path("outputs", "some"))


def config(**changes: Any) -> Config:
    return replace(parse(raw_config()), **changes)


@pytest.mark.parametrize(
    ("topology", "text"),
    [
        (Topology(1, 1, 0, 1), "1 process, CPU"),
        (Topology(1, 4, 0, 2), "4 processes, CPU"),
        (Topology(1, 1, 1, 1), "1 process, 1 GPU"),
        (Topology(1, 4, 8, 2), "4 processes, 8 GPUs"),
    ],
)
def test_what_starts_where_is_announced(run_dir: RunDir, topology: Topology, text: str) -> None:
    expected = f"Training some: {text}\noutputs/some/{run_dir.path.name}"
    assert announcement("Training", "some", topology, run_dir) == expected


def test_options_that_replace_the_recipes_own_are_announced(run_dir: RunDir) -> None:
    replaced = {"model=toy": "cnn", "optimizer=adam": "sgd"}
    line, _ = announcement("Training", "some", Topology(1, 1, 0, 1), run_dir, replaced=replaced).splitlines()
    assert line == "Training some (model=toy instead of cnn, optimizer=adam instead of sgd): 1 process, CPU"


def test_a_place_outside_of_the_working_directory_is_shown_whole(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run_dir.path / "deeper").mkdir()
    monkeypatch.chdir(run_dir.path / "deeper")
    assert announcement("Training", "some", Topology(1, 1, 0, 1), run_dir).endswith(f"\n{run_dir.path}")


def test_results_are_shown_with_where_everything_lies(run_dir: RunDir) -> None:
    results = {"steps": 1200, "seconds": 3.25, "ended_by": "trainer.max_epochs reached"}
    last = {"step": 1100, "metrics": {"val/loss": 0.123456}}
    tested = {"step": 1200, "metrics": {"test/accuracy": 1.0}}
    run_dir.update_run({"results": {**results, "best": None, "last": last, "test": tested}})
    write_small(run_dir.checkpoints, 1200)
    run_dir.tensorboard.mkdir()
    path = f"outputs/some/{run_dir.path.name}"
    assert closing_of_training(config(), run_dir, 0).splitlines() == [
        "",
        "Finished some after 1,200 steps in 3.2 s (trainer.max_epochs reached)",
        "                       last (step 1,100)  (step 1,200)",
        "  val/loss             0.1235             –",
        "  test/accuracy        –                  1.0000",
        f"  run          {path}",
        f"  checkpoints  {path}/checkpoints",
        f"  logs         {path}/logs",
        f"  resume       python -m framework resume={path}",
        "  look         tensorboard --logdir outputs",
    ]


@pytest.mark.parametrize(
    ("last_step", "lines"),
    [
        (
            9,
            [
                "                       best (step 7)  last (step 9)",
                "  val/accuracy         0.9889         0.9833",
                "  test/accuracy        0.9750         –",
            ],
        ),
        (
            7,
            [
                "                       best and last (step 7)",
                "  val/accuracy         0.9889",
                "  test/accuracy        0.9750",
            ],
        ),
    ],
)
def test_the_best_and_the_last_validation_are_shown_with_their_steps(
    run_dir: RunDir, last_step: int, lines: list[str]
) -> None:
    results = {
        "best": {"step": 7, "metrics": {"val/accuracy": 0.9889}},
        "last": {"step": last_step, "metrics": {"val/accuracy": 0.9833 if last_step == 9 else 0.9889}},
        "test": {"step": 7, "metrics": {"test/accuracy": 0.975}},
    }
    run_dir.update_run({"results": results})
    assert closing_of_training(config(), run_dir, 0).splitlines()[2 : 2 + len(lines)] == lines


def test_the_worst_of_the_slow_ranks_is_named(run_dir: RunDir) -> None:
    slow = SlowRank(3, "node1, cuda:3", "data", 0.18, 1, 900, throughout=True)
    less = SlowRank(1, "node0, cuda:1", "compute", 0.11, 301, 900, throughout=False)
    results = {"steps": 900, "slow_ranks": [slow.to_plain(), less.to_plain()]}
    run_dir.update_run({"results": results})
    assert "  rank 3 (node1, cuda:3) is 18 % slower in data" in closing_of_training(config(), run_dir, 0).splitlines()
    run_dir.update_run({"results": {**results, "slow_ranks": []}})
    assert "slower" not in closing_of_training(config(), run_dir, 0)


def test_a_stopped_run_says_where_and_how_to_go_on(run_dir: RunDir) -> None:
    run_dir.update_run({"results": {"steps": 1200, "seconds": 3.25, "ended_by": "stopped on request (SIGTERM)"}})
    write_small(run_dir.checkpoints, 1200)
    text = closing_of_training(config(), run_dir, EXIT_STOPPED)
    assert "Stopped some on request (SIGTERM) after step 1,200, which is saved" in text.splitlines()
    assert f"python -m framework resume=outputs/some/{run_dir.path.name}" in text


def test_a_failed_run_shows_no_results_not_even_an_earlier_beginnings(run_dir: RunDir) -> None:
    run_dir.update_run({"results": {"steps": 5, "last": {"step": 5, "metrics": {"val/loss": 1.0}}}})
    text = closing_of_training(config(), run_dir, 1)
    assert "Finished" not in text
    assert "val/loss" not in text
    assert "logs" in text


@pytest.mark.parametrize("status", [0, 1, 75])
def test_resuming_is_offered_only_where_there_is_a_checkpoint(run_dir: RunDir, status: int) -> None:
    run_dir.update_run({"status": "running"})
    (run_dir.checkpoints / "step_00000010").mkdir(parents=True)  # one that was being written
    assert "resume" not in closing_of_training(config(), run_dir, status)
    write_small(run_dir.checkpoints, 20)
    assert f"resume=outputs/some/{run_dir.path.name}" in closing_of_training(config(), run_dir, status)


def test_commands_are_those_for_the_place_they_are_printed_in(
    run_dir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = run_dir.path.parents[1].rename(tmp_path / "my, outputs")
    moved = RunDir(outputs / "some" / run_dir.path.name)
    moved.update_run({"status": "running"})
    write_small(moved.checkpoints, 20)
    moved.tensorboard.mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    rows = [shlex.split(line) for line in closing_of_training(config(), moved, 1).splitlines()]
    assert ["resume", "python", "-m", "framework", f"resume='{moved.path}'"] in rows
    assert ["look", "tensorboard", "--logdir", str(outputs)] in rows


def test_curves_that_tensorboard_was_not_told_are_not_offered(run_dir: RunDir) -> None:
    run_dir.update_run({"status": "running"})
    assert "tensorboard" not in closing_of_training(config(), run_dir, 1)


def test_an_interruption_before_the_first_checkpoint_says_so(run_dir: RunDir) -> None:
    assert "No checkpoint yet; begin anew: " in interruption(run_dir)
    assert "last checkpoint" not in interruption(run_dir)


def test_an_interruption_says_how_to_go_on(run_dir: RunDir) -> None:
    write_small(run_dir.checkpoints, 20)
    text = interruption(run_dir)
    assert "Go on from the last checkpoint: " in text
    assert text.splitlines()[-1].endswith(f"python -m framework resume=outputs/some/{run_dir.path.name}")
    assert "every process has ended" in text
