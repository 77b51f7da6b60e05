"""Jobs one after another: what is said of each when it ends, and of all at the end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from framework.config.parse import parse
from framework.errors import EXIT_STOPPED, ConfigError, RunError
from framework.jobs.request import JobResult, Place, Request
from framework.jobs.sweep import Finished, distinguishing, run_sweep, table
from framework.run_dir import RunDir, create_run_dir
from tests.unit.config.raw import raw_config

FOLDER = Path("outputs/multirun/x")


def request(number: int, *, monitor: str = "val/loss") -> Request:
    raw = raw_config({"seed": number, "checkpoint.monitor": monitor})
    return Request(parse(raw), raw, ("recipe=some", f"seed={number}"), place=Place(FOLDER, number))


def act(request: Request) -> JobResult:
    """What each job does, by its seed."""
    assert request.place is not None
    seed = request.config.seed
    if seed == 3:
        raise ConfigError("a wrong key")
    run_dir = create_run_dir(request.place.folder, name=str(request.place.number))
    if seed == 1:
        raise RunError("the disk is gone")
    if seed == 2:
        raise ZeroDivisionError("unexpected")
    return JobResult(EXIT_STOPPED if seed == 4 else 0, run_dir, score=0.25)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """Run a job for each seed."""
    monkeypatch.chdir(tmp_path)

    def run_jobs(*seeds: int, job: Callable[[Request], JobResult] = act) -> int:
        monkeypatch.setitem(sys.modules, "framework.jobs.train", SimpleNamespace(main=job, check=lambda _: None))
        return run_sweep([request(seed) for seed in seeds])

    return run_jobs


def test_each_job_is_reported_before_the_next_starts(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[str, str]] = []

    def job(request: Request) -> JobResult:
        seen.append(tuple(capsys.readouterr()))  # type: ignore[arg-type]
        return act(request)

    assert run(0, 1, 2, 3, job=job) == 1
    seen.append(tuple(capsys.readouterr()))  # type: ignore[arg-type]
    assert seen[0] == ("4 jobs in outputs/multirun/x\n", "")
    assert seen[1][0].startswith("[0] seed=0  finished  0.2500  ")
    assert seen[2][0].startswith("[1] seed=1  FAILED (1)  ")
    assert seen[2][0].endswith("  log: outputs/multirun/x/1\n")  # no rank came to open one
    assert seen[2][1] == "the disk is gone\n"
    assert "ZeroDivisionError: unexpected" in seen[3][1]
    assert "Traceback" in seen[3][1]
    refused, _, rest = seen[4][0].partition("\n")
    assert refused.startswith("[3] seed=3  FAILED (2)")
    assert "log:" not in refused  # it has no directory
    assert "3 of 4 jobs failed: 1, 2, 3" in rest
    assert "tensorboard --logdir outputs/multirun/x" in rest


def test_a_sweep_without_failures_ends_well(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(0, 5) == 0
    assert "failed" not in capsys.readouterr().out


def test_a_stopped_job_ends_the_sweep(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(0, 4, 5, 6)
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("[4] seed=4  stopped  ")
    assert lines[2].endswith("  resume=outputs/multirun/x/4")
    assert any("2 more were not started" in line for line in lines)
    assert not any("failed" in line for line in lines)


def test_an_interrupted_job_ends_the_sweep(run: Callable[..., int]) -> None:
    def interrupt(_: Request) -> JobResult:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(0, 5, job=interrupt)


@pytest.mark.parametrize(
    ("overrides", "labels"),
    [
        ([("a=1", "b=1"), ("a=1", "b=2")], ["b=1", "b=2"]),
        ([("a=1", "b=1")], ["a=1 b=1"]),
        ([("a=1",), ("b=1",)], ["a=1", "b=1"]),
        ([("a=1",), ("a=1",)], ["", ""]),
    ],
)
def test_jobs_are_labelled_by_what_differs(overrides: list[tuple[str, ...]], labels: list[str]) -> None:
    assert distinguishing(overrides) == labels


def test_the_table_has_overrides_status_score_and_time_of_each_job() -> None:
    results = [JobResult(0, RunDir(Path("0")), score=1.0), JobResult(1), JobResult(0)]
    finished = [Finished(request(number), result, seconds=12.34) for number, result in enumerate(results)]
    rows = [line.split() for line in table(finished).splitlines() if line]
    assert rows == [
        ["job", "overrides", "status", "best", "val/loss", "s"],
        ["0", "seed=0", "finished", "1.0000", "12.3"],
        ["1", "seed=1", "FAILED", "(1)", "–", "12.3"],
        ["2", "seed=2", "finished", "–", "12.3"],
    ]
    both = [finished[0], Finished(request(1, monitor="val/accuracy"), results[0], seconds=1)]
    assert table(both).splitlines()[1].split() == ["job", "overrides", "status", "best", "s"]
