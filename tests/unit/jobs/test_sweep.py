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

Act = Callable[[Request], JobResult]


def request(number: int, *, folder: Path = Path("outputs/multirun/x"), monitor: str | None = "val/loss") -> Request:
    raw = raw_config({"seed": number, "checkpoint.monitor": monitor})
    overrides = ("recipe=some", f"seed={number}")
    return Request(parse(raw), raw, overrides, place=Place(folder, number))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Act, int], int]:
    """Runs so many jobs, each being `act`."""

    def run_jobs(act: Act, number: int) -> int:
        monkeypatch.setitem(sys.modules, "framework.jobs.train", SimpleNamespace(main=act, check=lambda _: None))
        monkeypatch.chdir(tmp_path)
        return run_sweep([request(each) for each in range(number)])

    return run_jobs


def test_each_line_is_there_before_the_next_job_starts(
    run: Callable[[Act, int], int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    seen: list[tuple[str, str]] = []

    def act(request: Request) -> JobResult:
        seen.append(tuple(capsys.readouterr()))  # type: ignore[arg-type]
        assert request.place is not None
        run_dir = create_run_dir(tmp_path / request.place.folder, name=str(request.place.number))
        if request.place.number == 1:
            raise RunError("the disk is gone")
        return JobResult(0, run_dir, score=0.25)

    assert run(act, 3) == 1
    assert seen[0] == ("3 jobs in outputs/multirun/x\n", "")
    assert seen[1][0].startswith("[0] seed=0  finished  0.2500  ")
    assert seen[2][0].startswith("[1] seed=1  FAILED (1)  ")
    assert seen[2][0].endswith("  log: outputs/multirun/x/1\n")  # no rank came to open one
    assert seen[2][1] == "the disk is gone\n"
    closing = capsys.readouterr().out
    assert "1 of 3 jobs failed: 1\n" in closing
    assert closing.endswith("\n  look         tensorboard --logdir outputs/multirun/x\n")


def test_all_well(run: Callable[[Act, int], int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(lambda _: JobResult(0), 2) == 0
    assert "failed" not in capsys.readouterr().out


def test_a_job_without_a_directory_has_no_log_to_show(
    run: Callable[[Act, int], int], capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: Request) -> JobResult:
        raise ConfigError("not so")

    assert run(refuse, 1) == 1
    printed = capsys.readouterr()
    assert printed.err == "not so\n"
    assert "FAILED (2)" in printed.out
    assert "log:" not in printed.out


def test_an_unexpected_exception_keeps_its_traceback_and_an_interrupt_passes(
    run: Callable[[Act, int], int], capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: Request) -> JobResult:
        raise ZeroDivisionError("oh")

    def interrupt(_: Request) -> JobResult:
        raise KeyboardInterrupt

    assert run(fail, 1) == 1
    assert "Traceback" in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        run(interrupt, 2)


def test_a_job_that_was_stopped_ends_the_sweep(
    run: Callable[[Act, int], int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def act(request: Request) -> JobResult:
        assert request.place is not None
        run_dir = create_run_dir(tmp_path / request.place.folder, name=str(request.place.number))
        return JobResult(EXIT_STOPPED if request.place.number == 1 else 0, run_dir)

    with pytest.raises(KeyboardInterrupt):
        run(act, 4)
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("[1] seed=1  stopped  ")
    assert lines[2].endswith("  resume=outputs/multirun/x/1")
    assert "Interrupted in job 1; 2 more were not started." in lines
    assert [line.split()[:3] for line in lines if line[:1].isdigit()][1:] == [
        ["0", "seed=0", "finished"],
        ["1", "seed=1", "stopped"],
    ]
    assert not any("failed" in line for line in lines)


@pytest.mark.parametrize(
    ("overrides", "labels"),
    [
        ([("a=1", "b=1"), ("a=1", "b=2")], ["b=1", "b=2"]),
        ([("a=1", "b=1")], ["a=1 b=1"]),
        ([("a=1",), ("b=1",)], ["a=1", "b=1"]),
        ([("a=1",), ("a=1",)], ["", ""]),
    ],
)
def test_labels_are_what_not_all_have(overrides: list[tuple[str, ...]], labels: list[str]) -> None:
    assert distinguishing(overrides) == labels


def test_the_table_is_aligned() -> None:
    results = [JobResult(0, RunDir(Path("0")), score=1.0), JobResult(1), JobResult(0)]
    finished = [Finished(request(number), result, seconds=12.34) for number, result in enumerate(results)]
    assert table(finished).splitlines() == [
        "",
        "job  overrides  status      best val/loss  s",
        "0    seed=0     finished    1.0000         12.3",
        "1    seed=1     FAILED (1)  –              12.3",
        "2    seed=2     finished    –              12.3",
    ]


def test_jobs_that_monitor_different_metrics_share_a_column() -> None:
    monitors = ("val/loss", "val/accuracy")
    finished = [Finished(request(n, monitor=m), JobResult(0, score=0.5), seconds=1) for n, m in enumerate(monitors)]
    assert table(finished).splitlines()[1].split() == ["job", "overrides", "status", "best", "s"]
