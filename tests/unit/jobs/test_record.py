"""run.json: with which code a run was started, and the starts and ends of a resumed one.

What else it records is tested with the README's commands.
"""

from __future__ import annotations

import subprocess
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.internals import (
    RunDir,
    RunStart,
    Topology,
    cpu_count,
    create_run_dir,
    record_end,
    record_module,
    record_start,
)
from tests.unit.config.raw import raw_config


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run directory; the working directory is elsewhere, in no repository."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    return create_run_dir(tmp_path / "outputs" / "some")


def git(*arguments: str) -> str:
    settings = ("user.name=a", "user.email=a@b.c", "commit.gpgsign=false", "core.hooksPath=/dev/null")
    own = [word for setting in settings for word in ("-c", setting)]
    return subprocess.run(["git", *own, *arguments], check=True, capture_output=True, text=True, timeout=60).stdout


def started(run_dir: RunDir, *typed: str) -> dict[str, Any]:
    start = RunStart(
        raw=raw_config(),
        overrides=(),
        search_path=(),
        arguments=["-m", "framework", *typed],
        topology=Topology(1, 2, 0, 1),
    )
    record_start(run_dir, start)
    return run_dir.read_run()


def test_revision_and_uncommitted_changes_are_recorded(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    git("init", "--quiet")
    Path("code.py").write_text("lr = 1\n")
    git("add", "code.py")
    git("commit", "--quiet", "-m", "one")
    assert started(run_dir)["git"] == {"revision": git("rev-parse", "HEAD").strip(), "diff": ""}
    Path("code.py").write_text("lr = 2\n")
    assert "-lr = 1\n+lr = 2\n" in started(run_dir)["git"]["diff"]
    monkeypatch.setattr(record_module, "_MAX_DIFF_CHARS", 200)
    Path("code.py").write_bytes(b"\xff\xfe latin\n" * 1000)
    assert len(started(run_dir)["git"]["diff"]) == 200
    monkeypatch.setenv("PATH", "/nowhere")
    assert started(run_dir)["git"] is None


def test_a_resumed_run_keeps_its_earlier_record(run_dir: RunDir) -> None:
    first = started(run_dir, "note=two words")
    assert (first["topology"]["world_size"], first["hardware"]["cpu_cores"]) == (2, cpu_count())
    record_end(run_dir, status="interrupted")
    ended = run_dir.read_run()
    assert (ended["status"], ended["started"]) == ("interrupted", first["started"])
    assert datetime.fromisoformat(ended["ended"]) >= datetime.fromisoformat(first["started"])
    started(run_dir, "number=1")
    run = started(run_dir, "number=2")
    assert (run["status"], run["ended"], run["command"]) == ("running", None, "python -m framework number=2")
    assert [(each["command"], each["status"], each["ended"]) for each in run["earlier"]] == [
        ("python -m framework 'note=two words'", "interrupted", ended["ended"]),
        # The run was killed.
        ("python -m framework number=1", "running", None),
    ]
