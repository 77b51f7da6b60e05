"""On a system that isn't Linux, a run in the command's own process trains, saves and resumes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import results
from tests.helpers.command import run_framework, run_python

pytestmark = pytest.mark.exhaustive
RUN = ("recipe=toy", "launcher=in_process", "data.num_workers=1", "trainer.progress=off")


def run_without_linux(*arguments: str, cwd: Path) -> str:
    """Return what the command printed."""
    done = run_python("-m", "tests.helpers.without_linux", *arguments, cwd=cwd, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def only_run(folder: Path) -> Path:
    [run_dir] = (folder / "outputs/toy").iterdir()
    return run_dir


def test_a_run_trains_saves_and_resumes_without_linux(tmp_path: Path) -> None:
    stopped = tmp_path / "stopped"
    whole = tmp_path / "whole"
    stopped.mkdir()
    whole.mkdir()
    run_without_linux(*RUN, "trainer.max_steps=10", cwd=stopped)
    resumed = run_without_linux(f"resume={only_run(stopped)}", "trainer.max_steps=20", cwd=stopped)
    assert "Resuming toy" in resumed

    assert run_framework(*RUN, "trainer.max_steps=20", cwd=whole).returncode == 0
    results.assert_same(results.weights(only_run(stopped)), results.weights(only_run(whole)))
