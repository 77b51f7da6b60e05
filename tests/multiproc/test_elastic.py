"""Restarts, and several nodes, on one machine: the same recipe, with a deed that happens once."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers import results, trouble
from tests.helpers.command import Started, run_framework, started_framework
from tests.helpers.trouble import EVERY, Deed

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

START_S = 120.0  # to training, on a machine with few cores
END_S = 60.0
STEPS = 3 * EVERY
ENDLESS = ("trainer.max_steps=100000",)


@pytest.fixture
def port() -> int:
    """Free when it was looked for."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found: int = listener.getsockname()[1]
    return found


def elastic(*overrides: str, restarts: int) -> list[str]:
    return [
        "recipe=trouble",
        "topology.procs_per_node=2",
        "launcher=elastic",
        f"launcher.max_restarts={restarts}",
        *overrides,
    ]


def of_node(node: int, port: int, *overrides: str) -> list[str]:
    return [
        "recipe=trouble",
        "topology=multi_node",
        "topology.procs_per_node=1",
        f"topology.rdzv_endpoint=127.0.0.1:{port}",
        f"topology.node_rank={node}",
        *overrides,
    ]


@contextmanager
def two_nodes(folder: Path, port: int, *overrides: str) -> Iterator[list[Started]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(started_framework(*of_node(node, port, *overrides), cwd=folder)) for node in range(2)
        ]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a run on two processes in which nothing happens."""
    folder = tmp_path_factory.mktemp("whole")
    trouble.write_recipe(folder, Deed())
    assert run_framework("recipe=trouble", "topology.procs_per_node=2", cwd=folder, timeout=START_S).returncode == 0
    return trouble.run_dir(folder)


def wait_for_checkpoint(folder: Path, started: Started) -> None:
    deadline = time.monotonic() + START_S
    while not any(folder.glob("outputs/trouble/*/checkpoints/last*")):
        assert started.process.poll() is None, started.printed()
        assert time.monotonic() < deadline, started.printed()
        time.sleep(0.02)


def report(run_dir: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run_dir / name).read_text())
    return content


# Restarts on one machine


def test_a_killed_rank_costs_nothing_but_time(tmp_path: Path, uninterrupted: Path) -> None:
    trouble.write_recipe(tmp_path, Deed("SIGKILL", rank=1, phase="forward", step=EVERY + 2))
    result = run_framework(*elastic(restarts=2), cwd=tmp_path, timeout=START_S)
    assert result.returncode == 0, result.stderr
    run_dir, pid = trouble.run_dir(tmp_path), trouble.done(tmp_path)["pid"]  # type: ignore[index]
    results.assert_same(results.weights(run_dir), results.weights(uninterrupted))
    line = f"Restart 1 of 2 after rank 1 of 2 (pid {pid}) failed: killed by SIGKILL"
    assert result.stderr.count(line) == 1, result.stderr
    assert result.stderr.count("failed first") == 1
    first = report(run_dir, "failure_attempt_0.json")
    assert (first["attempt"], first["first"]["rank"], first["first"]["signal"]) == (0, 1, "SIGKILL")
    assert not (run_dir / "failure.json").exists()
    run = results.run_file(run_dir)
    assert run["status"] == "finished"
    (restart,) = run["restarts"]
    assert restart["attempt"] == 1
    assert restart["cause"].startswith(line.partition(" after ")[2])
    assert results.results(run_dir)["steps"] == STEPS


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["tcp", "file"])
def test_ranks_meet_again_by_every_init_method(tmp_path: Path, method: str) -> None:
    trouble.write_recipe(tmp_path, Deed("raise", rank=0, phase="optimizer", step=2))
    result = run_framework(*elastic(f"backend.init_method={method}", restarts=1), cwd=tmp_path, timeout=START_S)
    assert result.returncode == 0, result.stderr
    assert "Restart 1 of 1 after rank 0 of 2" in result.stderr
    assert results.results(trouble.run_dir(tmp_path))["steps"] == STEPS


@pytest.mark.exhaustive
def test_when_no_restart_is_left_the_run_has_failed(tmp_path: Path) -> None:
    trouble.write_recipe(tmp_path, Deed("raise", rank=1, phase="forward", step=2))
    task = tmp_path / "recipes" / "trouble.py"
    task.write_text(task.read_text().replace('if Path("done.json").exists():', "if False:"))  # always again
    result = run_framework(*elastic(restarts=1), cwd=tmp_path, timeout=START_S)
    assert result.returncode == 1
    assert result.stderr.count("Rank 1 of 2") == 2, result.stderr
    assert "Restart 2" not in result.stderr
    run_dir = trouble.run_dir(tmp_path)
    assert report(run_dir, "failure_attempt_0.json")["attempt"] == 0
    assert report(run_dir, "failure.json")["attempt"] == 1
    assert results.run_file(run_dir)["status"] == "failed"


def test_a_wrong_request_is_not_tried_again(tmp_path: Path) -> None:
    trouble.write_recipe(tmp_path, Deed())
    result = run_framework(*elastic("+model.nonsense=1", restarts=3), cwd=tmp_path, timeout=START_S)
    assert result.returncode == 2
    assert "nonsense" in result.stderr
    assert "Restart" not in result.stderr
    assert not list(tmp_path.glob("outputs/trouble/*"))


def test_a_run_that_is_asked_to_stop_is_not_started_again(tmp_path: Path) -> None:
    trouble.write_recipe(tmp_path, Deed(pause=0.05))
    with started_framework(*elastic(*ENDLESS, restarts=3), cwd=tmp_path) as started:
        wait_for_checkpoint(tmp_path, started)
        started.process.send_signal(signal.SIGTERM)
        assert started.wait(timeout=END_S) == 75, started.printed()
        started.assert_all_gone()
        assert "Restart" not in started.stderr()


# Several nodes on loopback


def test_a_rank_killed_on_another_node_costs_nothing_but_time(tmp_path: Path, port: int, uninterrupted: Path) -> None:
    trouble.write_recipe(tmp_path, Deed("SIGKILL", rank=1, phase="backward", step=EVERY + 2))
    with two_nodes(tmp_path, port, "launcher.max_restarts=2") as nodes:
        for node in nodes:
            assert node.wait(timeout=START_S) == 0, node.printed()
            node.assert_all_gone()
            assert node.stderr().count("Restart 1 of 2 after rank 1 of 2") == 1, node.printed()
            assert node.stderr().count("Rank 1 of 2") == 1
    run_dir = trouble.run_dir(tmp_path)
    results.assert_same(results.weights(run_dir), results.weights(uninterrupted))
    assert [restart["attempt"] for restart in results.run_file(run_dir)["restarts"]] == [1]


def test_a_node_that_was_started_with_something_else_is_refused(tmp_path: Path, port: int) -> None:
    trouble.write_recipe(tmp_path, Deed())
    with (
        started_framework(*of_node(0, port), cwd=tmp_path) as first,
        started_framework(*of_node(1, port, "seed=7"), cwd=tmp_path) as second,
    ):
        for node in (first, second):
            assert node.wait(timeout=START_S) == 2, node.printed()
            node.assert_all_gone()
            assert "seed=7" in node.stderr()
    assert not list(tmp_path.glob("outputs/*/*"))


@pytest.mark.exhaustive
def test_a_second_node_of_the_same_number_is_refused_and_does_not_stand_for_another(tmp_path: Path, port: int) -> None:
    trouble.write_recipe(tmp_path, Deed(pause=0.05))
    with (
        started_framework(*of_node(0, port, *ENDLESS), cwd=tmp_path) as first,
        started_framework(*of_node(1, port, *ENDLESS), cwd=tmp_path) as second,
    ):
        wait_for_checkpoint(tmp_path, first)
        third = run_framework(*of_node(1, port, *ENDLESS), cwd=tmp_path, timeout=START_S)
        assert third.returncode == 2, third.stderr
        assert f"Node 1 of 2 is there already in the run of 127.0.0.1:{port}: process" in third.stderr
        assert "part of the run" not in third.stdout
        second.process.send_signal(signal.SIGINT)
        for node in (first, second):
            assert node.wait(timeout=END_S) == 75, node.printed()
            node.assert_all_gone()


@pytest.mark.exhaustive
def test_a_node_whose_command_is_killed_and_typed_again_goes_on(tmp_path: Path, port: int) -> None:
    trouble.write_recipe(tmp_path, Deed(pause=0.1))
    with two_nodes(tmp_path, port, "launcher.max_restarts=1", "trainer.max_steps=100") as (first, second):
        wait_for_checkpoint(tmp_path, first)
        second.process.kill()
        second.wait(timeout=END_S)
        second.assert_all_gone()
        first.wait_for_output("is out of reach", timeout=END_S)
        arguments = of_node(1, port, "launcher.max_restarts=1", "trainer.max_steps=100")
        with started_framework(*arguments, cwd=tmp_path) as again:
            assert again.wait(timeout=START_S) == 0, first.printed() + again.printed()
            again.assert_all_gone()
        assert first.wait(timeout=END_S) == 0, first.printed()
        first.assert_all_gone()
        assert "Restart 1 of 1 after node 1 was out of reach" in first.stderr()
    assert results.results(trouble.run_dir(tmp_path))["steps"] == 100


@pytest.mark.exhaustive
def test_a_node_that_does_not_come_again_is_named(tmp_path: Path, port: int) -> None:
    trouble.write_recipe(tmp_path, Deed(pause=0.1))
    with two_nodes(tmp_path, port, *ENDLESS, "launcher.max_restarts=3", "backend.init_timeout=20s") as (first, second):
        wait_for_checkpoint(tmp_path, first)
        second.process.kill()
        assert first.wait(timeout=END_S) == 1, first.printed()
        first.assert_all_gone()
        assert f"Node 1 of 2 didn't come to 127.0.0.1:{port} again within" in first.stderr()
    run_dir = trouble.run_dir(tmp_path)
    assert report(run_dir, "failure.json")["first"]["kind"] == "unreachable"
    assert not list(run_dir.glob("failure_attempt_*"))
    assert results.run_file(run_dir)["status"] == "failed"


def test_a_node_that_does_not_come_is_named(tmp_path: Path, port: int) -> None:
    trouble.write_recipe(tmp_path, Deed())
    result = run_framework(*of_node(0, port, "backend.init_timeout=6s"), cwd=tmp_path, timeout=START_S)
    assert result.returncode == 1
    assert f"Node 1 of 2 didn't come to 127.0.0.1:{port} within backend.init_timeout=6 s" in result.stderr
    assert not list(tmp_path.glob("outputs/*/*"))


@pytest.mark.exhaustive
def test_a_node_finds_out_that_there_is_no_node_0(tmp_path: Path, port: int) -> None:
    trouble.write_recipe(tmp_path, Deed())
    result = run_framework(*of_node(1, port, "backend.init_timeout=3s"), cwd=tmp_path, timeout=START_S)
    assert result.returncode == 1
    assert f"nobody at topology.rdzv_endpoint=127.0.0.1:{port}" in result.stderr


def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    trouble.write_recipe(tmp_path, Deed())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        result = run_framework(*of_node(0, port), cwd=tmp_path, timeout=START_S)
    assert result.returncode == 1
    assert f"topology.rdzv_endpoint=127.0.0.1:{port}: Address already in use" in result.stderr


@pytest.mark.parametrize("node", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_ctrl_c_at_any_node_stops_all_with_a_checkpoint(tmp_path: Path, port: int, node: int) -> None:
    trouble.write_recipe(tmp_path, Deed(pause=0.05))
    with two_nodes(tmp_path, port, *ENDLESS) as nodes:
        wait_for_checkpoint(tmp_path, nodes[0])
        nodes[node].process.send_signal(signal.SIGINT)
        for started in nodes:
            assert started.wait(timeout=END_S) == 75, started.printed()
            started.assert_all_gone()
    assert results.run_file(trouble.run_dir(tmp_path))["status"] == "stopped"


@pytest.mark.exhaustive
def test_a_second_ctrl_c_ends_all_at_once(tmp_path: Path, port: int) -> None:
    trouble.write_recipe(tmp_path, Deed("sleep", rank=0, phase="forward", step=EVERY + 2, pause=0.05))
    with two_nodes(tmp_path, port, *ENDLESS, "launcher.max_restarts=3") as nodes:
        trouble.wait_until_done(tmp_path, nodes[0], timeout=START_S)
        nodes[1].process.send_signal(signal.SIGINT)
        nodes[1].wait_for_output("Ctrl-C again ends at once", timeout=END_S)
        nodes[1].process.send_signal(signal.SIGINT)
        for started in nodes:
            assert started.wait(timeout=END_S) == 130, started.printed()
            started.assert_all_gone()


@pytest.mark.parametrize(
    ("node", "who"),
    [
        (1, "rank"),
        *(
            pytest.param(node, who, marks=pytest.mark.exhaustive)
            for node, who in [(0, "agent"), (0, "keeper"), (0, "rank"), (1, "agent"), (1, "keeper")]
        ),
    ],
)
def test_no_process_is_left_whoever_is_killed(tmp_path: Path, port: int, node: int, who: str) -> None:
    trouble.write_recipe(tmp_path, Deed(pause=0.05))
    with two_nodes(tmp_path, port, *ENDLESS, "backend.timeout=10s") as nodes:
        wait_for_checkpoint(tmp_path, nodes[0])
        os.kill(child_of(nodes[node], who), signal.SIGKILL)
        for started in nodes:
            assert started.wait(timeout=END_S) == 1, started.printed()
            started.assert_all_gone()


def child_of(started: Started, who: str) -> int:
    """The process of the command that does this, told by the order in which the fork server makes them."""
    (server,) = psutil.Process(started.process.pid).children()
    is_node_0 = "topology.node_rank=0" in psutil.Process(started.process.pid).cmdline()
    order = ["keeper", "agent", "rank"] if is_node_0 else ["agent", "keeper", "rank"]
    pids = sorted(child.pid for child in server.children())
    return pids[order.index(who)]
