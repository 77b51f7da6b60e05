"""What is read from the folders of trials: of finished ones, and of those that crashed, wait, or are damaged."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from framework.errors import DiskError, RunError
from tests.helpers.internals import (
    FailureKind,
    FailureReport,
    RankFailure,
    RunDir,
    SweepFolder,
    bad_loss,
    bad_weights,
    failure_facts,
    locked,
    read_results,
    record_of,
)
from tests.unit.sweeps.trials import plan, trained, write_trial


def test_a_finished_trial_has_its_best_score(tmp_path: Path) -> None:
    run_dir = write_trial(tmp_path, 3, results=trained(0.25))
    (trial,) = read_results(SweepFolder(tmp_path), [plan(3, "optimizer.lr=0.1")])
    assert (trial.number, trial.status, trial.run) == (3, "finished", run_dir.path)
    assert trial.overrides == ("recipe=some", "optimizer.lr=0.1")
    assert (trial.score, trial.step, trial.steps, trial.epochs) == (0.25, 30, 40, 2)
    assert trial.final_score == 0.25
    assert trial.seconds == 7.5
    assert trial.cause is None


def test_a_resumed_trial_has_the_time_of_all_its_starts(tmp_path: Path) -> None:
    start = {"started": "2026-01-01T09:00:00+00:00", "ended": "2026-01-01T09:01:00+00:00"}
    write_trial(tmp_path, 0, results=trained(0.25), earlier=[start])
    (trial,) = read_results(SweepFolder(tmp_path), [plan(0)])
    assert trial.seconds == 67.5


def remove_config(run_dir: RunDir) -> None:
    run_dir.config_file.unlink()


def write_garbage(run_dir: RunDir) -> None:
    run_dir.run_file.write_bytes(b'{"status": "fini')


def make_config_a_folder(run_dir: RunDir) -> None:
    run_dir.config_file.unlink()
    run_dir.config_file.mkdir()


@pytest.mark.parametrize("damage", [remove_config, write_garbage, make_config_a_folder])
def test_a_damaged_trial_is_named_damaged(tmp_path: Path, damage: Callable[[RunDir], None]) -> None:
    damage(write_trial(tmp_path, 0, results=trained(0.25)))
    write_trial(tmp_path, 1, results=trained(0.5))
    damaged, whole = read_results(SweepFolder(tmp_path), [plan(0), plan(1)])
    assert (damaged.status, damaged.score, damaged.final_score) == ("damaged", None, None)
    assert (whole.status, whole.score) == ("finished", 0.5)


def test_a_trial_without_results_has_a_status(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    (tmp_path / "3").write_text("")
    write_trial(tmp_path, 4, status="running")
    write_trial(tmp_path, 5, status="running")
    plans = [plan(number) for number in range(6)]
    with locked(RunDir(tmp_path / "2")), locked(RunDir(tmp_path / "5")):
        statuses = [trial.status for trial in read_results(SweepFolder(tmp_path), plans)]
    # A trial that isn't there, a folder without records, one that has only begun, a file in place of the folder, and
    # runs without and with a process.
    assert statuses == ["waiting", "crashed", "running", "crashed", "crashed", "running"]


def test_an_unfinished_trial_has_its_best_score_so_far(tmp_path: Path) -> None:
    run_dir = write_trial(tmp_path, 0, status="running", ended=None)
    rows = [{"step": step, "val/loss": loss} for step, loss in ((10, 0.5), (20, 0.3), (30, 0.4))]
    run_dir.metrics_file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (trial,) = read_results(SweepFolder(tmp_path), [plan(0)])
    assert (trial.status, trial.score, trial.final_score) == ("crashed", 0.3, None)
    assert (trial.step, trial.steps, trial.seconds) == (None, None, None)


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_a_score_that_is_no_number_is_not_compared(tmp_path: Path, score: float) -> None:
    write_trial(tmp_path, 0, results=trained(score))
    (trial,) = read_results(SweepFolder(tmp_path), [plan(0)])
    assert (trial.status, trial.final_score) == ("finished", None)


# Causes


def raised(error: BaseException) -> dict[str, Any]:
    """Return how a rank failed that raised this."""
    try:
        raise error
    except BaseException as caught:
        facts = failure_facts(record_of(caught), None)
    assert facts is not None
    return facts


def ended(**facts: Any) -> dict[str, Any]:
    return {"time": 1.0, **facts}


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


FAILURES: dict[str, list[dict[str, Any]]] = {
    "out of memory": [
        raised(OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")),
        raised(
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
        ),
        raised(MemoryError()),
        ended(kind="signal", signal="SIGKILL", status=-9, oom=True),
        ended(kind="signal", signal="SIGABRT", status=-6, said="CUDA error: out of memory"),
    ],
    "NaN loss": [raised(bad_loss(float("nan"), step=7, epoch=0))],
    "infinite loss": [raised(bad_loss(float("-inf"), step=None, epoch=3))],
    "NaN or infinite loss": [raised(bad_loss("not finite", step=7, epoch=0))],
    "NaN or infinite weights": [raised(bad_weights(step=7))],
    "timed out": [
        ended(kind="hung", waited_s=30.0),
        ended(kind="exception", exception="RuntimeError: Timed out", timed_out=True, lost_peer=True),
    ],
    "suspended": [ended(kind="stopped", waited_s=30.0)],
    "node lost": [ended(kind="unreachable")],
    "killed (SIGKILL)": [ended(kind="signal", signal="SIGKILL", status=-9)],
    "killed (SIGSEGV)": [ended(kind="signal", signal="SIGSEGV", status=-11)],
    "exit status 3": [ended(kind="exit", status=3)],
    "process gone": [ended(kind="exit", status=None)],
    "ZeroDivisionError": [raised(ZeroDivisionError("division by zero"))],
    "KeyboardInterrupt": [raised(KeyboardInterrupt())],
    "JSONDecodeError": [raised(json.JSONDecodeError("Expecting value", "", 0))],
    "disk full": [
        raised(DiskError("Rank 0 can't write a.pt: No space left on device.\nMake room: rm -r old")),
        raised(RunError("There is no room for a checkpoint: one takes about 28.7 kB, and 4.1 kB are free in /data.")),
        raised(OSError(errno.ENOSPC, "No space left on device")),
    ],
    "DiskError": [raised(DiskError("Rank 0 can't write a.pt: Read-only file system."))],
    "error": [
        ended(kind="exception", exception="(no text)"),
        ended(kind="exception", exception="Lost.", expected=True),
        ended(kind="exception"),
    ],
}


@pytest.mark.parametrize(("cause", "facts"), [(cause, facts) for cause in FAILURES for facts in FAILURES[cause]])
def test_a_failed_trial_has_a_cause_in_few_words(tmp_path: Path, cause: str, facts: dict[str, Any]) -> None:
    run_dir = write_trial(tmp_path, 0, status="failed")
    first = RankFailure(**{"rank": 0, "node": 0, "log": "", **facts, "kind": FailureKind(facts["kind"])})
    report = FailureReport(world_size=1, first=first, others=())
    (run_dir.path / "failure.json").write_text(json.dumps(report.to_plain()))
    (trial,) = read_results(SweepFolder(tmp_path), [plan(0)])
    assert (trial.status, trial.cause) == ("failed", cause)


@pytest.mark.parametrize(
    "report",
    ["", "[]", "{}", '{"first": {"kind": "odd"}, "others": []}', '{"first": 3, "others": [], "world_size": 1}'],
)
def test_a_damaged_failure_report_gives_no_cause(tmp_path: Path, report: str) -> None:
    run_dir = write_trial(tmp_path, 0, status="failed")
    (run_dir.path / "failure.json").write_text(report)
    (trial,) = read_results(SweepFolder(tmp_path), [plan(0)])
    assert (trial.status, trial.cause) == ("failed", None)


def test_a_failure_before_a_resume_is_no_cause(tmp_path: Path) -> None:
    run_dir = write_trial(tmp_path, 0, results=trained(0.5))
    first = RankFailure(0, FailureKind.HUNG, 0, time=1.0, log="")
    report = FailureReport(world_size=1, first=first, others=())
    (run_dir.path / "failure.json").write_text(json.dumps(report.to_plain()))
    (trial,) = read_results(SweepFolder(tmp_path), [plan(0)])
    assert (trial.status, trial.cause) == ("finished", None)


# Code


def test_a_trial_of_changed_code_is_marked(tmp_path: Path) -> None:
    modules: list[dict[str, str] | None] = [
        {"recipes.some": "a"},
        {"recipes.some": "a", "own": "c"},
        None,
        {"recipes.some": "b"},
        {"recipes.some": "a", "own": "d"},
        {"own": "d", "another": "e"},
    ]
    for number, hashes in enumerate(modules):
        write_trial(tmp_path, number, results=trained(0.5), modules=hashes)
    # In any order, the first one is that with the lowest number.
    trials = read_results(SweepFolder(tmp_path), [plan(number) for number in (5, 4, 3, 2, 1, 0)])
    assert [trial.number for trial in trials if trial.code_changed] == [5, 4, 3]
