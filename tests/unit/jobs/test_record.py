"""run.json: how a run was started, with which code, on what, and how it ended."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import torch

from framework.hardware import cpu_count
from framework.jobs import record
from framework.jobs.record import record_end, record_start
from framework.run_dir import RunDir, create_run_dir
from framework.topology import Topology

TOPOLOGY = Topology(nnodes=1, procs_per_node=2, gpus_per_node=0, span=1)


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
    record_start(run_dir, TOPOLOGY, arguments=typed)
    return run_dir.read_run()


def test_a_start_records_command_versions_hardware_and_topology(run_dir: RunDir) -> None:
    typed = ["recipe=some", "task.note=two words", "optimizer.lr=1e-3"]
    run = started(run_dir, *typed)
    assert run["status"] == "running"
    assert shlex.split(run["command"]) == ["python", "-m", "framework", *typed]
    sizes = {"nnodes": 1, "procs_per_node": 2, "gpus_per_node": 0, "span": 1, "world_size": 2}
    assert sizes.items() <= run["topology"].items()
    assert torch.__version__.startswith(run["versions"]["torch"])  # without the build, "+cu132"
    assert run["versions"]["python"] == sys.version.split()[0]
    assert run["hardware"]["cpu_cores"] == cpu_count()
    assert run["git"] is None
    assert abs((datetime.now(timezone.utc) - datetime.fromisoformat(run["started"])).total_seconds()) < 60
    assert "earlier" not in run
    assert run["process"] == {"pid": os.getpid(), "host": socket.gethostname()}


def test_revision_and_uncommitted_changes_are_recorded(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    git("init", "--quiet")
    Path("code.py").write_text("lr = 1\n")
    git("add", "code.py")
    git("commit", "--quiet", "-m", "one")
    assert started(run_dir)["git"] == {"revision": git("rev-parse", "HEAD").strip(), "diff": ""}
    Path("code.py").write_text("lr = 2\n")
    assert "-lr = 1\n+lr = 2\n" in started(run_dir)["git"]["diff"]
    monkeypatch.setattr(record, "_MAX_DIFF_CHARS", 200)
    Path("code.py").write_bytes(b"\xff\xfe latin\n" * 1000)
    assert len(started(run_dir)["git"]["diff"]) == 200
    monkeypatch.setenv("PATH", "/nowhere")
    assert started(run_dir)["git"] is None


def test_a_resumed_run_keeps_its_earlier_starts_and_ends(run_dir: RunDir) -> None:
    first = started(run_dir, "number=0")
    record_end(run_dir, status="interrupted")
    ended = run_dir.read_run()
    assert (ended["status"], ended["started"]) == ("interrupted", first["started"])
    assert datetime.fromisoformat(ended["ended"]) >= datetime.fromisoformat(first["started"])
    started(run_dir, "number=1")
    run = started(run_dir, "number=2")
    assert (run["status"], run["ended"], run["command"]) == ("running", None, "python -m framework number=2")
    assert [(each["command"], each["status"], each["ended"]) for each in run["earlier"]] == [
        ("python -m framework number=0", "interrupted", ended["ended"]),
        ("python -m framework number=1", "running", None),  # it was killed
    ]
    assert json.loads(run_dir.run_file.read_text()) == run
