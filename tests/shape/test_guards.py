"""The guards themselves: each leak is seen, named and cleared away."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from tests.helpers import processes
from tests.helpers.command import run_python, started_python
from tests.helpers.guards import LeakError, no_leaks

SLEEP = "import time; time.sleep(60)"
ORPHANING = (
    "import subprocess, sys;"
    "null = subprocess.DEVNULL;"
    f"child = subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True, stdout=null, stderr=null);"
    "print(child.pid)"
)


def leaks(act: Callable[[], object], *, owns_state: bool = False) -> str:
    """What the guards say about `act`; empty where they say nothing."""
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


def test_a_clean_block_passes() -> None:
    assert leaks(lambda: None) == ""


def test_a_child_process_is_named_and_ended() -> None:
    child: list[subprocess.Popen[bytes]] = []
    said = leaks(lambda: child.append(subprocess.Popen([sys.executable, "-c", SLEEP])))
    assert f"process pid {child[0].pid}" in said
    child[0].wait(timeout=5)
    assert child[0].returncode == -signal.SIGKILL or not psutil.pid_exists(child[0].pid)


def test_an_orphan_is_named_and_ended() -> None:
    pids: list[int] = []
    command = [sys.executable, "-c", ORPHANING]
    said = leaks(lambda: pids.append(int(subprocess.run(command, capture_output=True, check=True).stdout)))
    assert f"process pid {pids[0]}" in said
    assert not processes.settle(
        lambda: [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"],
        within_s=5,
    )


def test_an_orphan_of_a_command_is_found() -> None:
    with started_python("-c", ORPHANING) as started:
        assert started.wait(timeout=30) == 0
        with pytest.raises(AssertionError, match=f"pid {int(started.stdout())} "):
            started.assert_all_gone(within_s=0.1)


def test_a_command_past_its_deadline_fails_the_test() -> None:
    with pytest.raises(AssertionError, match=r"still running after 0\.5 s"):
        run_python("-c", "print('begun', flush=True); " + SLEEP, timeout=0.5)


def test_a_running_command_can_be_waited_for() -> None:
    with started_python("-c", "print('ready', flush=True); " + SLEEP) as started:
        started.wait_for_output("ready", timeout=30)
        assert [process.pid for process in started.processes()] == [started.process.pid]
        started.process.kill()
        assert started.wait(timeout=5) == -signal.SIGKILL
        started.assert_all_gone()


@pytest.fixture
def release() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize("daemon", [False, True])
def test_a_thread_is_named(release: threading.Event, daemon: bool) -> None:
    thread = threading.Thread(target=release.wait, name="forgotten", daemon=daemon)
    assert "thread 'forgotten'" in leaks(thread.start)
    release.set()
    thread.join()


def test_an_open_file_is_named(tmp_path: Path) -> None:
    files = []
    assert f"open file {tmp_path / 'left'}" in leaks(lambda: files.append((tmp_path / "left").open("w")))
    files[0].close()


def test_a_handler_of_the_root_logger_is_named_and_removed() -> None:
    handler = logging.StreamHandler()
    assert "root logger: <StreamHandler" in leaks(lambda: logging.root.addHandler(handler))
    assert handler not in logging.root.handlers


def test_a_process_group_is_named_and_destroyed(tmp_path: Path) -> None:
    def make() -> None:
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)

    assert "process group" in leaks(make)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("name", "act"),
    [
        ("FRAMEWORK_LEFT", lambda: os.environ.update(FRAMEWORK_LEFT="1")),
        ("working directory", lambda: os.chdir("/")),
        ("sys.path", lambda: sys.path.append("/left")),
        ("sys.argv", lambda: sys.argv.append("left")),
        ("SIGUSR2", lambda: signal.signal(signal.SIGUSR2, signal.SIG_IGN)),
        ("random", random.random),
        ("NumPy", lambda: np.random.seed(5)),
        ("default dtype", lambda: torch.set_default_dtype(torch.float64)),
        ("grad mode", lambda: torch.set_grad_enabled(False)),
        ("number of threads", lambda: torch.set_num_threads(torch.get_num_threads() + 1)),
        ("deterministic mode", lambda: torch.use_deterministic_algorithms(True, warn_only=True)),
        ("cudnn.benchmark", lambda: setattr(torch.backends.cudnn, "benchmark", not torch.backends.cudnn.benchmark)),
    ],
)
def test_a_changed_setting_is_named_and_put_back(name: str, act: Callable[[], object]) -> None:
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
