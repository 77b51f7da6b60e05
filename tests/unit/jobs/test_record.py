from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

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
    """A run directory, the working directory being elsewhere, in no repository."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    return create_run_dir(tmp_path / "outputs" / "some")


def git(*arguments: str) -> str:
    own = (
        "-c",
        "user.name=a",
        "-c",
        "user.email=a@b.c",
        "-c",
        "commit.gpgsign=false",
        "-c",
        "core.hooksPath=/dev/null",
    )
    return subprocess.run(["git", *own, *arguments], check=True, capture_output=True, text=True, timeout=10).stdout


def test_a_beginning_tells_command_versions_hardware_and_topology(run_dir: RunDir) -> None:
    typed = ["recipe=some", "task.note=two words", "optimizer.lr=1e-3"]
    record_start(run_dir, TOPOLOGY, arguments=typed)
    run = run_dir.read_run()
    assert run["status"] == "running"
    assert shlex.split(run["command"]) == ["python", "-m", "framework", *typed]
    sizes = {"nnodes": 1, "procs_per_node": 2, "gpus_per_node": 0, "span": 1, "world_size": 2}
    assert sizes.items() <= run["topology"].items()
    assert torch.__version__.startswith(run["versions"]["torch"])  # without the build, "+cu132"
    assert run["versions"]["python"] == sys.version.split()[0]
    assert run["versions"]["hydra-core"].startswith("1.3")
    assert run["hardware"]["cpu_cores"] == cpu_count()
    assert run["git"] is None
    started = datetime.fromisoformat(run["started"])
    assert abs((datetime.now(timezone.utc) - started).total_seconds()) < 60
    assert "earlier" not in run
    assert run["process"] == {"pid": os.getpid(), "host": socket.gethostname()}


def test_a_package_that_is_missing_is_said_to_be(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "_PACKAGES", ("torch", "no-such-package"))
    record_start(run_dir, TOPOLOGY, arguments=())
    assert run_dir.read_run()["versions"]["no-such-package"] == "not installed"


def test_in_a_repository_revision_and_uncommitted_changes_are_kept(run_dir: RunDir) -> None:
    git("init", "--quiet")
    Path("code.py").write_text("lr = 1\n")
    git("add", "code.py")
    git("commit", "--quiet", "-m", "one")
    record_start(run_dir, TOPOLOGY, arguments=())
    assert run_dir.read_run()["git"] == {"revision": git("rev-parse", "HEAD").strip(), "diff": ""}
    Path("code.py").write_text("lr = 2\n")
    record_start(run_dir, TOPOLOGY, arguments=())
    diff = run_dir.read_run()["git"]["diff"]
    assert "-lr = 1\n+lr = 2\n" in diff


def test_bytes_that_are_no_text_and_a_huge_diff_do_no_harm(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "_MAX_DIFF_CHARS", 200)
    git("init", "--quiet")
    Path("code.py").write_bytes(b"old\n")
    git("add", "code.py")
    git("commit", "--quiet", "-m", "one")
    Path("code.py").write_bytes(b"\xff\xfe latin\n" * 1000)
    record_start(run_dir, TOPOLOGY, arguments=())
    assert len(run_dir.read_run()["git"]["diff"]) == 200


def test_without_git_there_is_none(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    record_start(run_dir, TOPOLOGY, arguments=())
    assert run_dir.read_run()["git"] is None


@pytest.mark.parametrize("status", ["finished", "failed", "interrupted", "stopped"])
def test_an_end_is_added(run_dir: RunDir, status: str) -> None:
    record_start(run_dir, TOPOLOGY, arguments=())
    started = run_dir.read_run()["started"]
    record_end(run_dir, status=status)
    run = run_dir.read_run()
    assert (run["status"], run["started"]) == (status, started)
    assert datetime.fromisoformat(run["ended"]) >= datetime.fromisoformat(started)


def test_a_resumed_run_keeps_the_beginnings_before(run_dir: RunDir) -> None:
    for number in range(3):
        record_start(run_dir, TOPOLOGY, arguments=[f"number={number}"])
        if number == 0:
            record_end(run_dir, status="interrupted")
    run = run_dir.read_run()
    assert run["status"] == "running"
    assert run["ended"] is None
    assert run["command"] == "python -m framework number=2"
    assert [(each["command"], each["status"]) for each in run["earlier"]] == [
        ("python -m framework number=0", "interrupted"),
        ("python -m framework number=1", "running"),  # it was killed
    ]
    assert run["earlier"][0]["ended"] is not None
    assert json.loads(run_dir.run_file.read_text()) == run
