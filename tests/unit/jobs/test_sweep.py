"""Jobs one after another: what each leaves on the screen, and what ends a sweep."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from framework.errors import EXIT_STOPPED, ConfigError, RunError
from tests.helpers.internals import JobResult, Request, Train, create_run_dir, parse, run_sweep
from tests.unit.config.raw import raw_config

FOLDER = Path("outputs/multirun/x")


def request(number: int) -> Request:
    raw = raw_config({"seed": number, "checkpoint.monitor": "val/loss"})
    return Request(parse(raw), raw, ("recipe=some", f"seed={number}"), sub_run=FOLDER / str(number))


def act(request: Request) -> JobResult:
    """What each job does, by its seed."""
    assert request.sub_run is not None
    seed = request.config.seed
    if seed == 3:
        raise ConfigError("a wrong key")
    if seed == 5:
        raise KeyboardInterrupt
    run_dir = create_run_dir(request.sub_run.parent, name=request.sub_run.name)
    if seed == 1:
        raise RunError("the disk is gone")
    if seed == 2:
        raise ZeroDivisionError("unexpected")
    return JobResult(EXIT_STOPPED if seed == 4 else 0, run_dir, score=0.25)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """Run a job for each seed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Train, "run", lambda _, request: act(request))
    monkeypatch.setattr(Train, "check", lambda *_: None)
    return lambda *seeds: run_sweep([request(seed) for seed in seeds])


def test_a_failing_job_is_shown_and_others_run(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(0, 1, 2, 3) == 1
    printed = capsys.readouterr()
    rows = [line.split() for line in printed.out.splitlines()]
    expected = []
    for number, status in enumerate(["finished", "FAILED", "FAILED", "FAILED"]):
        job = [f"[{number}]", f"seed={number}"]
        expected += [[*job, "running"], [*job, status]]
    assert [row[:3] for row in rows if row and row[0].startswith("[")] == expected
    # Leave out the column of seconds.
    table = [row[:-1] for row in rows if row and row[0] in "0123"]
    assert table[0] == ["0", "seed=0", "finished", "0.2500"]
    assert table[3] == ["3", "seed=3", "FAILED", "(2)", "–"]
    assert "3 of 4 jobs failed: 1, 2, 3" in printed.out
    # No rank opened a log.
    assert "log: outputs/multirun/x/1" in printed.out
    # The job has no directory.
    assert "outputs/multirun/x/3" not in printed.out
    assert "tensorboard --logdir outputs/multirun/x" in printed.out
    assert "the disk is gone\n" in printed.err
    assert "ZeroDivisionError: unexpected" in printed.err
    # Only an unexpected error has a traceback.
    assert printed.err.count("Traceback") == 1


def test_a_stopped_job_ends_the_sweep_with_its_status(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(0, 4, 6, 7) == EXIT_STOPPED
    out = capsys.readouterr().out
    assert "stopped" in out
    assert "resume=outputs/multirun/x/4" in out
    assert "Stopped in job 1; 2 more were not started" in out
    assert "failed" not in out


def test_an_interrupted_job_ends_the_sweep(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(0, 5, 6)
    out = capsys.readouterr().out
    assert "stopped" not in out
    assert "Interrupted in job 1; 1 more were not started" in out
    assert "failed" not in out
