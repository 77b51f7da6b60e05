"""The guards themselves: each leak is seen, named and cleared away. A failed test is named at once."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from tests.helpers.command import run_python, started_python
from tests.helpers.guards import LeakError, no_leaks

SLEEP = "import time; print(flush=True); time.sleep(60)"
ORPHANING = (
    "import subprocess, sys;"
    "streams = {'stdout': subprocess.PIPE, 'stderr': subprocess.DEVNULL};"
    f"child = subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True, **streams);"
    # Right after exec, a process has no environment yet.
    "child.stdout.readline();"
    "print(child.pid)"
)


def leaks(act: Callable[[], object], *, owns_state: bool = False) -> str:
    """Return what the guards say about `act`; empty if they say nothing."""
    kept = []
    try:
        with no_leaks(owns_state=owns_state):
            kept.append(act())
    except LeakError as error:
        return str(error)
    return ""


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.helpers.guards.GRACE_S", 0.1)


def test_an_orphan_is_named_and_ended() -> None:
    pids: list[int] = []
    command = [sys.executable, "-c", ORPHANING]
    said = leaks(lambda: pids.append(int(subprocess.run(command, capture_output=True, check=True).stdout)))
    assert f"process pid {pids[0]}" in said
    assert not psutil.pid_exists(pids[0]) or psutil.Process(pids[0]).status() == psutil.STATUS_ZOMBIE


def test_an_orphan_or_a_slow_command_fails() -> None:
    with started_python("-c", ORPHANING) as started:
        assert started.wait(timeout=30) == 0
        with pytest.raises(AssertionError, match=f"pid {int(started.stdout())} "):
            started.assert_all_gone(within_s=0.1)
    with pytest.raises(AssertionError, match=r"still running after 0\.5 s"):
        run_python("-c", SLEEP, timeout=0.5)


def test_every_kind_of_leak_is_named(tmp_path: Path) -> None:
    release = threading.Event()
    files = []
    handler = logging.StreamHandler()
    thread = threading.Thread(target=release.wait, name="forgotten", daemon=True)

    def leave() -> None:
        thread.start()
        files.append((tmp_path / "left").open("w"))
        logging.root.addHandler(handler)
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)

    said = leaks(leave)
    release.set()
    thread.join()
    files[0].close()
    for fact in ("thread 'forgotten'", f"open file {tmp_path / 'left'}", "<StreamHandler", "process group"):
        assert fact in said
    assert handler not in logging.root.handlers
    assert not torch.distributed.is_initialized()


def test_changed_settings_are_named_and_put_back() -> None:
    changes: dict[str, Callable[[], object]] = {
        "FRAMEWORK_LEFT": lambda: os.environ.update(FRAMEWORK_LEFT="1"),
        "working directory": lambda: os.chdir("/"),
        "sys.path": lambda: sys.path.append("/left"),
        "SIGUSR2": lambda: signal.signal(signal.SIGUSR2, signal.SIG_IGN),
        "random": random.random,
        "NumPy": lambda: np.random.seed(5),
        "default dtype": lambda: torch.set_default_dtype(torch.float64),
        "number of threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    }
    for name, act in changes.items():
        assert name in leaks(act)
        assert leaks(act, owns_state=True) == ""
        assert leaks(lambda: None) == ""


def test_torch_draws_the_same_in_every_test() -> None:
    drawn: list[float] = []
    before = torch.get_rng_state()
    for _ in range(2):
        assert leaks(lambda: drawn.append(torch.rand(1).item())) == ""
    assert drawn[0] == drawn[1]
    assert torch.equal(torch.get_rng_state(), before)


FAILING = """
import pytest

@pytest.fixture
def broken():
    raise OSError("no such place")

def test_passes():
    pass

def test_fails():
    raise ValueError("first line\\nsecond line")

def test_cannot_start(broken):
    pass
"""


def test_a_failed_test_is_named_before_the_end(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(FAILING)
    started = ("-m", "pytest", "-p", "tests.conftest", f"--rootdir={tmp_path}", f"--confcutdir={tmp_path}")
    ended = run_python(*started, "--numprocesses=1", cwd=tmp_path)
    assert ended.returncode == 1, ended.stderr
    lines = ended.stdout.partition("= ERRORS =")[0].splitlines()
    assert "FAILED test_some.py::test_fails - ValueError: first line" in lines
    assert "ERROR test_some.py::test_cannot_start - OSError: no such place" in lines
