"""Restarts, and several nodes on one machine. A rank's deed happens once: see `tests/helpers/trouble.py`."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from framework.errors import EXIT_STOPPED
from tests.helpers import results, trouble
from tests.helpers.command import Started, run_framework, started_framework
from tests.helpers.stopping import meanwhile, wait_until
from tests.helpers.trouble import EVERY, Deed

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]
exhaustive = pytest.mark.exhaustive

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


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, warm: Any) -> Path:
    """The run directory of a run on two processes in which nothing happens."""
    from framework import cli
    from tests.helpers import guards

    folder = tmp_path_factory.mktemp("whole")
    trouble.write_recipe(folder, Deed())
    with guards.no_leaks(owns_state=True), pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert cli.main(["recipe=trouble", "topology.procs_per_node=2"], warm=warm) == 0
    return trouble.run_dir(folder)


def report(run_dir: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run_dir / name).read_text())
    return content


def has_checkpoint(folder: Path, *running: Started) -> bool:
    for started in running:
        assert started.process.poll() is None, started.printed()
    return any(folder.glob("outputs/trouble/*/checkpoints/last*"))


# Restarts on one machine


@pytest.fixture
def elastic(
    train: Callable[..., Path], tmp_path: Path, own_state: None, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[Path, str]]:
    """Run two ranks that are restarted; return the run directory and what was printed on stderr."""

    def run(deed: Deed, *overrides: str, restarts: int, status: int = 0, always: bool = False) -> tuple[Path, str]:
        trouble.write_recipe(tmp_path, deed)
        if always:
            recipe = tmp_path / "recipes" / "trouble.py"
            recipe.write_text(recipe.read_text().replace('if Path("done.json").exists():', "if False:"))
        launcher = ("topology.procs_per_node=2", "launcher=elastic", f"launcher.max_restarts={restarts}")
        run_dir = train("recipe=trouble", *launcher, *overrides, status=status)
        return run_dir, capsys.readouterr().err

    return run


def test_a_killed_rank_costs_only_time(elastic: Callable[..., Any], tmp_path: Path, uninterrupted: Path) -> None:
    run_dir, err = elastic(Deed("SIGKILL", rank=1, phase="forward", step=EVERY + 2), restarts=2)
    done = trouble.done(tmp_path)
    assert done is not None
    results.assert_same(results.weights(run_dir), results.weights(uninterrupted))
    line = f"Restart 1 of 2 after rank 1 of 2 (pid {done['pid']}) failed: killed by SIGKILL"
    assert (err.count(line), err.count("failed first")) == (1, 1), err
    first = report(run_dir, "failure_attempt_0.json")
    assert (first["attempt"], first["first"]["rank"], first["first"]["signal"]) == (0, 1, "SIGKILL")
    assert not (run_dir / "failure.json").exists()
    run = results.run_file(run_dir)
    assert (run["status"], run["results"]["steps"]) == ("finished", STEPS)
    (restart,) = run["restarts"]
    assert restart["attempt"] == 1
    assert restart["cause"].startswith(line.partition(" after ")[2])


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["file", pytest.param("tcp", marks=exhaustive)])
def test_restarted_ranks_meet_by_every_init_method_until_no_restart_is_left(
    elastic: Callable[..., Any], method: str
) -> None:
    deed = Deed("raise", rank=1, phase="optimizer", step=2)
    run_dir, err = elastic(deed, f"backend.init_method={method}", restarts=1, status=1, always=True)
    assert err.count("Rank 1 of 2") == 2, err
    assert "Restart 1 of 1 after rank 1 of 2" in err
    assert "Restart 2" not in err
    assert report(run_dir, "failure_attempt_0.json")["attempt"] == 0
    assert report(run_dir, "failure.json")["attempt"] == 1
    assert results.run_file(run_dir)["status"] == "failed"


def test_a_wrong_request_is_not_tried_again(elastic: Callable[..., Any], tmp_path: Path) -> None:
    _, err = elastic(Deed(), "+model.nonsense=1", restarts=3, status=2)
    assert "nonsense" in err
    assert "Restart" not in err
    assert not list(tmp_path.glob("outputs/trouble/*"))


@pytest.mark.exhaustive
def test_a_run_that_is_asked_to_stop_is_not_restarted(elastic: Callable[..., Any], tmp_path: Path) -> None:
    def stop() -> None:
        wait_until(lambda: has_checkpoint(tmp_path))
        os.kill(os.getpid(), signal.SIGINT)

    with meanwhile(stop):
        run_dir, err = elastic(Deed(pause=0.05), *ENDLESS, restarts=3, status=EXIT_STOPPED)
    assert "Restart" not in err
    assert results.run_file(run_dir)["status"] == "stopped"


# Several nodes on loopback


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


def assert_ends(nodes: list[Started], status: int, *, within_s: float = END_S) -> None:
    for node in nodes:
        assert node.wait(timeout=within_s) == status, node.printed()
        node.assert_all_gone()


@pytest.mark.exhaustive
def test_a_rank_that_dies_on_another_node_is_restarted_and_ctrl_c_there_stops_all(tmp_path: Path, port: int) -> None:
    trouble.write_recipe(tmp_path, Deed("SIGKILL", rank=1, phase="backward", step=EVERY + 2, pause=0.05))
    with two_nodes(tmp_path, port, *ENDLESS, "launcher.max_restarts=2", "backend.timeout=30s") as nodes:
        nodes[0].wait_for_output("Restart 1: resuming after step", timeout=START_S)
        saved = (trouble.run_dir(tmp_path) / "checkpoints" / "last").readlink()
        wait_until(lambda: (trouble.run_dir(tmp_path) / "checkpoints" / "last").readlink() != saved)
        nodes[1].process.send_signal(signal.SIGINT)
        assert_ends(nodes, EXIT_STOPPED)
        for node in nodes:
            assert node.stderr().count("Restart 1 of 2 after rank 1 of 2") == 1, node.printed()
            assert node.stderr().count("Rank 1 of 2") == 1
    run_dir = trouble.run_dir(tmp_path)
    run = results.run_file(run_dir)
    assert run["status"] == "stopped"
    assert [restart["attempt"] for restart in run["restarts"]] == [1]
    assert results.pointed(run_dir, "last") == run["results"]["steps"]
    first = report(run_dir, "failure_attempt_0.json")["first"]
    assert (first["rank"], first["node"], first["signal"], first["phase"]) == (1, 1, "SIGKILL", "backward")


@exhaustive
def test_a_rank_killed_on_another_node_costs_only_time(tmp_path: Path, port: int, uninterrupted: Path) -> None:
    trouble.write_recipe(tmp_path, Deed("SIGKILL", rank=1, phase="backward", step=EVERY + 2))
    with two_nodes(tmp_path, port, "launcher.max_restarts=2") as nodes:
        assert_ends(nodes, 0, within_s=START_S)
    run_dir = trouble.run_dir(tmp_path)
    results.assert_same(results.weights(run_dir), results.weights(uninterrupted))
    assert [restart["attempt"] for restart in results.run_file(run_dir)["restarts"]] == [1]


@exhaustive
def test_a_node_that_was_started_with_something_else_is_refused(tmp_path: Path, port: int) -> None:
    trouble.write_recipe(tmp_path, Deed())
    with (
        started_framework(*of_node(0, port), cwd=tmp_path) as first,
        started_framework(*of_node(1, port, "seed=7"), cwd=tmp_path) as second,
    ):
        assert_ends([first, second], 2, within_s=START_S)
        assert "seed=7" in first.stderr()
        assert "seed=7" in second.stderr()
    assert not list(tmp_path.glob("outputs/*/*"))


@exhaustive
def test_a_second_node_of_the_same_number_is_refused(tmp_path: Path, port: int) -> None:
    trouble.write_recipe(tmp_path, Deed(pause=0.05))
    with two_nodes(tmp_path, port, *ENDLESS) as nodes:
        wait_until(lambda: has_checkpoint(tmp_path, *nodes))
        third = run_framework(*of_node(1, port, *ENDLESS), cwd=tmp_path, timeout=START_S)
        assert third.returncode == 2, third.stderr
        assert f"Node 1 of 2 is there already in the run of 127.0.0.1:{port}: process" in third.stderr
        nodes[1].process.send_signal(signal.SIGINT)
        assert_ends(nodes, EXIT_STOPPED)


@exhaustive
@pytest.mark.parametrize("comes_again", [True, False])
def test_a_node_whose_command_is_killed_may_come_again(tmp_path: Path, port: int, comes_again: bool) -> None:
    trouble.write_recipe(tmp_path, Deed(pause=0.1))
    overrides = ("launcher.max_restarts=1", "trainer.max_steps=100", "backend.init_timeout=20s")
    with two_nodes(tmp_path, port, *overrides) as (first, second):
        wait_until(lambda: has_checkpoint(tmp_path, first, second))
        second.process.kill()
        second.wait(timeout=END_S)
        second.assert_all_gone()
        if comes_again:
            first.wait_for_output("is out of reach", timeout=END_S)
            with started_framework(*of_node(1, port, *overrides), cwd=tmp_path) as again:
                assert_ends([again, first], 0, within_s=START_S)
            assert "Restart 1 of 1 after node 1 was out of reach" in first.stderr()
        else:
            assert_ends([first], 1, within_s=START_S)
            assert f"Node 1 of 2 didn't come to 127.0.0.1:{port} again within" in first.stderr()
    run_dir = trouble.run_dir(tmp_path)
    if comes_again:
        assert results.results(run_dir)["steps"] == 100
    else:
        assert report(run_dir, "failure.json")["first"]["kind"] == "unreachable"
        assert results.run_file(run_dir)["status"] == "failed"


@exhaustive
@pytest.mark.parametrize(
    ("node", "message"),
    [(0, "Node 1 of 2 didn't come to {} within backend.init_timeout=3 s"), (1, "nobody at topology.rdzv_endpoint={}")],
)
def test_a_node_that_does_not_come_is_named(tmp_path: Path, port: int, node: int, message: str) -> None:
    trouble.write_recipe(tmp_path, Deed())
    result = run_framework(*of_node(node, port, "backend.init_timeout=3s"), cwd=tmp_path, timeout=START_S)
    assert result.returncode == 1
    assert message.format(f"127.0.0.1:{port}") in result.stderr
    assert not list(tmp_path.glob("outputs/*/*"))


@exhaustive
def test_an_endpoint_that_node_0_cannot_host_is_named(tmp_path: Path) -> None:
    """192.0.2.1 is nobody's: an address for documentation."""
    trouble.write_recipe(tmp_path, Deed())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        taken = run_framework(*of_node(0, port), cwd=tmp_path, timeout=START_S)
    assert taken.returncode == 1
    assert f"topology.rdzv_endpoint=127.0.0.1:{port}: Address already in use" in taken.stderr
    foreign = f"topology.rdzv_endpoint=192.0.2.1:{port}"
    result = run_framework(*of_node(0, port), foreign, "backend.init_timeout=3s", cwd=tmp_path, timeout=START_S)
    assert result.returncode == 2
    assert f"Node 0 doesn't reach itself at {foreign}" in result.stderr


@exhaustive
def test_a_second_ctrl_c_ends_all_nodes(tmp_path: Path, port: int) -> None:
    trouble.write_recipe(tmp_path, Deed("sleep", rank=0, phase="forward", step=EVERY + 2, pause=0.05))
    with two_nodes(tmp_path, port, *ENDLESS, "launcher.max_restarts=3") as nodes:
        trouble.wait_until_done(tmp_path, nodes[0], timeout=START_S)
        nodes[1].process.send_signal(signal.SIGINT)
        nodes[1].wait_for_output("Ctrl-C again ends at once", timeout=END_S)
        nodes[1].process.send_signal(signal.SIGINT)
        assert_ends(nodes, 130)


@exhaustive
@pytest.mark.parametrize(("node", "child"), [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)])
def test_no_process_is_left_on_any_node_whichever_is_killed(tmp_path: Path, port: int, node: int, child: int) -> None:
    """A child of the node's fork server, in the order of their start."""
    trouble.write_recipe(tmp_path, Deed(pause=0.05))
    with two_nodes(tmp_path, port, *ENDLESS, "backend.timeout=10s") as nodes:
        wait_until(lambda: has_checkpoint(tmp_path, *nodes))
        (server,) = psutil.Process(nodes[node].process.pid).children()
        sorted(server.children(), key=lambda process: process.pid)[child].kill()
        assert_ends(nodes, 1)
