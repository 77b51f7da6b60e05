"""Restarts, and several nodes on one machine. A rank's fault happens once: see `tests/helpers/trouble.py`."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from framework.errors import EXIT_STOPPED
from tests.helpers import results, trouble
from tests.helpers.command import Started, run_framework, started_framework
from tests.helpers.stopping import wait_until
from tests.helpers.trouble import EVERY, Fault

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]
exhaustive = pytest.mark.exhaustive

# The time to start training on a machine with few cores.
START_S = 120.0
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
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, fork_server: Any) -> Path:
    """The run directory of a run on two processes in which nothing happens."""
    from tests.helpers import guards
    from tests.helpers.internals import compose

    folder = tmp_path_factory.mktemp("whole")
    trouble.write_recipe(folder, Fault())
    with guards.no_leaks(owns_state=True), pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert compose.main(["recipe=trouble", "topology.procs_per_node=2"], fork_server=fork_server) == 0
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

    def run(fault: Fault, *overrides: str, restarts: int, status: int = 0, always: bool = False) -> tuple[Path, str]:
        trouble.write_recipe(tmp_path, fault)
        if always:
            recipe = tmp_path / "recipes" / "trouble.py"
            recipe.write_text(recipe.read_text().replace('if Path("done.json").exists():', "if False:"))
        launcher = ("topology.procs_per_node=2", "launcher=elastic", f"launcher.max_restarts={restarts}")
        run_dir = train("recipe=trouble", *launcher, *overrides, status=status)
        return run_dir, capsys.readouterr().err

    return run


def test_a_killed_rank_costs_only_time(elastic: Callable[..., Any], tmp_path: Path, uninterrupted: Path) -> None:
    run_dir, err = elastic(Fault("SIGKILL", rank=1, phase="forward", step=EVERY + 2), restarts=2)
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


@exhaustive
@pytest.mark.parametrize("method", ["file", "tcp"])
def test_ranks_restart_by_every_init_method(elastic: Callable[..., Any], method: str) -> None:
    fault = Fault("raise", rank=1, phase="optimizer", step=2)
    run_dir, err = elastic(fault, f"backend.init_method={method}", restarts=1, status=1, always=True)
    assert err.count("Rank 1 of 2") == 2, err
    assert "Restart 1 of 1 after rank 1 of 2" in err
    assert "Restart 2" not in err
    assert report(run_dir, "failure_attempt_0.json")["attempt"] == 0
    assert report(run_dir, "failure.json")["attempt"] == 1
    assert results.run_file(run_dir)["status"] == "failed"


def test_a_wrong_request_is_not_tried_again(elastic: Callable[..., Any], tmp_path: Path) -> None:
    _, err = elastic(Fault(), "+optimizer.groups=[{params: nonsense, lr: 0.1}]", restarts=3, status=2)
    assert "no parameter matches nonsense" in err
    assert "Restart" not in err
    assert not list(tmp_path.glob("outputs/trouble/*"))


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


@exhaustive
def test_a_dead_rank_of_another_node_is_restarted(tmp_path: Path, port: int) -> None:
    trouble.write_recipe(tmp_path, Fault("SIGKILL", rank=1, phase="backward", step=EVERY + 2, pause=0.05))
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
    assert first["rank"] == 1
    assert first["node"] == 1
    assert first["signal"] == "SIGKILL"
    assert first["phase"] == "backward"


@exhaustive
def test_a_node_started_differently_is_refused(tmp_path: Path, port: int) -> None:
    trouble.write_recipe(tmp_path, Fault())
    with (
        started_framework(*of_node(0, port), cwd=tmp_path) as first,
        started_framework(*of_node(1, port, "seed=7"), cwd=tmp_path) as second,
    ):
        assert_ends([first, second], 2, within_s=START_S)
        assert "seed: 7" in first.stderr()
        assert "seed: 7" in second.stderr()
    assert not list(tmp_path.glob("outputs/*/*"))


@exhaustive
def test_a_killed_node_may_rejoin(tmp_path: Path, port: int) -> None:
    trouble.write_recipe(tmp_path, Fault(pause=0.1))
    overrides = ("launcher.max_restarts=1", "trainer.max_steps=100", "backend.init_timeout=20s")
    with two_nodes(tmp_path, port, *overrides) as (first, second):
        wait_until(lambda: has_checkpoint(tmp_path, first, second))
        second.process.kill()
        second.wait(timeout=END_S)
        second.assert_all_gone()
        first.wait_for_output("is out of reach", timeout=END_S)
        with started_framework(*of_node(1, port, *overrides), cwd=tmp_path) as again:
            assert_ends([again, first], 0, within_s=START_S)
        assert "Restart 1 of 1 after node 1 was out of reach" in first.stderr()
    assert results.results(trouble.run_dir(tmp_path))["steps"] == 100


@dataclass(frozen=True, kw_only=True)
class Alone:
    """A node that meets no other, and how it ends."""

    node: int = 0
    overrides: tuple[str, ...] = ()
    status: int = 1
    message: str


@exhaustive
@pytest.mark.parametrize(
    "alone",
    [
        Alone(
            message="Node 1 of 2 didn't come to topology.rdzv_endpoint=127.0.0.1:{port} within backend.init_timeout=3 s"
        ),
        Alone(node=1, message="could not reach topology.rdzv_endpoint=127.0.0.1:{port}"),
        # an address for documentation, which nobody has
        Alone(
            overrides=("topology.rdzv_endpoint=192.0.2.1:29400",),
            status=2,
            message="doesn't reach itself at topology.rdzv_endpoint=192.0.2.1",
        ),
    ],
)
def test_a_node_that_does_not_come_is_named(tmp_path: Path, port: int, alone: Alone) -> None:
    trouble.write_recipe(tmp_path, Fault())
    command = of_node(alone.node, port, "backend.init_timeout=3s", *alone.overrides)
    result = run_framework(*command, cwd=tmp_path, timeout=START_S)
    assert result.returncode == alone.status
    assert alone.message.format(port=port) in result.stderr
    assert not list(tmp_path.glob("outputs/*/*"))


@exhaustive
@pytest.mark.parametrize(("node", "what"), [(0, "rank"), (1, "rank"), (1, "run server")])
def test_a_killed_node_leaves_no_process(tmp_path: Path, port: int, node: int, what: str) -> None:
    trouble.write_recipe(tmp_path, Fault(pause=0.05))
    with two_nodes(tmp_path, port, *ENDLESS, "backend.timeout=10s") as nodes:
        wait_until(lambda: has_checkpoint(tmp_path, *nodes))
        (server,) = psutil.Process(nodes[node].process.pid).children()
        (run_server,) = server.children()
        (rank,) = run_server.children()
        (rank if what == "rank" else run_server).kill()
        assert_ends(nodes, 1)
