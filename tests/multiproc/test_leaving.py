"""Ends that don't come: ranks whose work is done and that stay, a keeper that is frozen, signals that are too late."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from framework.config.schema import InitMethod
from framework.errors import EXIT_STOPPED, LaunchError, TopologyError
from framework.launch import local, node_run
from framework.launch.node_run import NodeRun
from framework.launch.plan import LaunchPlan
from framework.launch.signals import heeded
from framework.launch.site import Site
from framework.launch.warm import WarmServer
from framework.launch.watch import Limits
from framework.launch.wire import Channel
from framework.run_dir import RunDir, create_run_dir
from framework.topology import Topology
from tests.helpers import processes, results, trouble
from tests.helpers.command import run_framework

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(120)]


def make_plan(entry: str, *, procs: int, run_dir: RunDir, warm: WarmServer) -> LaunchPlan:
    return LaunchPlan(
        entry=f"tests.multiproc.entries:{entry}",
        run_dir=run_dir,
        topology=Topology(nnodes=1, procs_per_node=procs, gpus_per_node=0, span=1),
        init_method=InitMethod.ENV,
        limits=Limits(init_timeout_s=60.0, timeout_s=60.0, late_after_s=30.0),
        terminal=True,
        warm=warm,
    )


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return create_run_dir(tmp_path / "leaving")


def children(server: WarmServer) -> list[psutil.Process]:
    every = psutil.Process(server._process.pid).children()
    return sorted((p for p in every if p.status() != psutil.STATUS_ZOMBIE), key=lambda p: (p.create_time(), p.pid))


def assert_idle(server: WarmServer) -> None:
    assert processes.settle(lambda: children(server), within_s=3.0) == []


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


# Ranks that stay


@pytest.mark.parametrize(
    ("how", "status"),
    [
        ("atexit", 0),
        pytest.param("thread", EXIT_STOPPED, marks=pytest.mark.exhaustive),
        pytest.param("thread", 0, marks=pytest.mark.exhaustive),
        pytest.param("atexit", EXIT_STOPPED, marks=pytest.mark.exhaustive),
    ],
)
def test_a_rank_that_is_done_and_does_not_leave_is_ended_and_the_run_counts(
    warm: WarmServer, run_dir: RunDir, capfd: pytest.CaptureFixture[str], how: str, status: int
) -> None:
    (run_dir.path / "how").write_text(f"{how} {status}")
    outcome = local.launch(make_plan("stay", procs=2, run_dir=run_dir, warm=warm))
    assert (outcome.status, outcome.failure) == (status, None)
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "doesn't leave" in line]
    pid = (run_dir.path / "staying").read_text()
    assert line.startswith(f"Rank 1 (pid {pid}) has done its work but doesn't leave: ended after 10 s")
    assert "_sleep at " in line
    assert_idle(warm)


@pytest.mark.exhaustive
def test_a_rank_that_is_done_early_may_wait_for_the_others(
    warm: WarmServer, run_dir: RunDir, capfd: pytest.CaptureFixture[str]
) -> None:
    """Longer than it may once all are done."""
    outcome = local.launch(make_plan("stay_while_another_works", procs=2, run_dir=run_dir, warm=warm))
    assert outcome.status == 0
    assert "doesn't leave" not in capfd.readouterr().err
    assert (run_dir.path / "left_by_itself").exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize("launcher", ["local", "elastic"])
def test_a_thread_of_the_users_does_not_hold_up_a_finished_run(tmp_path: Path, launcher: str) -> None:
    trouble.write_recipe(tmp_path, trouble.Deed())
    task = tmp_path / "recipes" / "trouble.py"
    thread = (
        "import threading\nif os.environ['RANK'] == '1': threading.Thread(target=time.sleep, args=(1000,)).start()\n"
    )
    task.write_text(f"{task.read_text()}\n{thread}")
    result = run_framework(
        "recipe=trouble", "topology.procs_per_node=2", f"launcher={launcher}", cwd=tmp_path, timeout=100.0
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("has done its work but doesn't leave") == 1, result.stderr
    run = results.run_file(trouble.run_dir(tmp_path))
    assert run["status"] == "finished"
    assert run["results"]["steps"] == 3 * trouble.EVERY


# A keeper that is frozen


@pytest.mark.parametrize("asked", [pytest.param("done", marks=pytest.mark.exhaustive), "stop"])
def test_a_frozen_keeper_ends_the_run(
    warm: WarmServer, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    monkeypatch.setattr(node_run, "_ANSWER_TIMEOUT_S", 2.0)
    frozen: list[int] = []

    def freeze() -> None:
        wait_until(lambda: all((run_dir.path / f"waiting_{rank}").exists() for rank in range(2)))
        frozen.append(children(warm)[0].pid)
        os.kill(frozen[0], signal.SIGSTOP)
        (run_dir.path / "go").touch()
        if asked == "stop":
            os.kill(os.getpid(), signal.SIGTERM)

    entry = "wait_for_go" if asked == "done" else "wait_long"
    waker = threading.Thread(target=freeze)
    waker.start()
    with pytest.raises(LaunchError, match=r"The keeper of this run \(pid \d+\) doesn't answer") as error:
        local.launch(make_plan(entry, procs=2, run_dir=run_dir, warm=warm))
    waker.join()
    assert f"(pid {frozen[0]})" in str(error.value)
    assert_idle(warm)


# Signals that are too late


def test_signals_after_the_last_rank_has_left_interrupt_nothing(
    warm: WarmServer, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two, with the keeper's word still to come."""
    note = NodeRun._note

    def interrupt_after(self: NodeRun, event: dict[str, object]) -> None:
        mine = event["key"] in self._running  # the server may still tell of the end of an earlier run's keeper
        note(self, event)
        if mine and len(self._exits) == 2:
            assert self._unconfirmed
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            self._on_signal()

    monkeypatch.setattr(NodeRun, "_note", interrupt_after)
    assert local.launch(make_plan("say_hello", procs=2, run_dir=run_dir, warm=warm)).status == 0
    assert_idle(warm)


# What is said


def test_the_exit_status_of_a_fork_server_that_has_yet_to_be_reaped_is_told() -> None:
    """The kernel closes the connection of a process before its end can be seen."""
    channel, theirs = Channel.pair()
    code = f"import os, time; os.close({theirs.fileno()}); time.sleep(0.5); os.kill(os.getpid(), 9)"
    with theirs:
        process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()])
    server = WarmServer(process, channel, environment={})
    try:
        with pytest.raises(LaunchError, match="its exit status is -9"):
            list(server.events())
    finally:
        server.close()


@pytest.mark.parametrize("init_timeout_s", [2.0, 60.0])
def test_an_endpoint_that_is_not_node_0s_own_is_a_wrong_request(
    warm: WarmServer, tmp_path: Path, init_timeout_s: float
) -> None:
    """192.0.2.1 is nobody's: an address for documentation."""
    topology = Topology(nnodes=2, procs_per_node=1, gpus_per_node=0, span=1)
    limits = Limits(init_timeout_s=init_timeout_s, timeout_s=60.0, late_after_s=30.0)
    port = free_port()
    site = Site(topology, limits, terminal=False, endpoint=("192.0.2.1", port))
    with heeded() as signals:
        run = NodeRun(site, warm, folder=tmp_path, signals=signals)
        try:
            with pytest.raises(TopologyError) as error:
                run.start()
        finally:
            run.close()
    first, second = str(error.value).splitlines()
    assert first == f"Node 0 doesn't reach itself at topology.rdzv_endpoint=192.0.2.1:{port}."
    assert second == "Name node 0 by an address that is its own, as the other nodes know it."
    assert_idle(warm)
