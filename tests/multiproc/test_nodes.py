"""One run over two hosts with a link between them: they agree, and each says which of them is at fault."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import results, trouble
from tests.helpers.command import Started
from tests.helpers.network import Host, network
from tests.helpers.requirements import require
from tests.helpers.trouble import Fault

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300), pytest.mark.exhaustive]

# Two hosts share few cores.
START_S = 120.0
TIMEOUT_S = 6.0
REPORT_S = 60.0
PAUSE_S = 0.05
OUTPUT: dict[str, Any] = {"check": True, "capture_output": True, "text": True}
LONG = (
    "recipe=trouble",
    "trainer.max_steps=100000",
    "trainer.val_check_interval=1000",
    "checkpoint.every_n_steps=1000",
)


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """Two hosts on one network."""
    require("netns")
    with network(2) as hosts:
        yield hosts


@contextmanager
def started_on_all(
    hosts: list[Host], *overrides: str, cwd: Path, secrets: Sequence[str | None] = (None, None)
) -> Iterator[list[Started]]:
    """The command on every host as its node, with the same overrides. secrets: of each, in the environment."""
    same = ("trainer.gpus=0", "topology=multi_node", f"topology.nnodes={len(hosts)}", "topology.procs_per_node=2")
    commands = []
    with ExitStack() as stack:
        for node, (host, secret) in enumerate(zip(hosts, secrets, strict=True)):
            command = host.started_framework(
                *same,
                f"topology.node_rank={node}",
                f"topology.rdzv_endpoint={hosts[0].address}:29400",
                *overrides,
                cwd=cwd,
                env={} if secret is None else {"FRAMEWORK_RDZV_SECRET": secret},
            )
            commands.append(stack.enter_context(command))
        yield commands


def wait_for_step(folder: Path, all_started: list[Started]) -> None:
    """Return once the first metrics are written: training is on its way."""
    deadline = time.monotonic() + START_S
    while not any(file.stat().st_size for file in folder.glob("outputs/trouble/*/metrics.jsonl")):
        for started in all_started:
            assert started.process.poll() is None, started.printed()
        assert time.monotonic() < deadline, "\n".join(started.printed() for started in all_started)
        time.sleep(0.05)


def failure(folder: Path, name: str = "failure.json") -> dict[str, Any]:
    content: dict[str, Any] = json.loads((trouble.run_dir(folder) / name).read_text())
    return content


def test_two_hosts_give_the_result_of_one_machine(
    hosts: list[Host], tmp_path: Path, shared_run: Callable[..., Path]
) -> None:
    with started_on_all(hosts, "recipe=toy", cwd=tmp_path) as all_started:
        for started in all_started:
            assert started.wait(timeout=START_S) == 0, started.printed()
            started.assert_all_gone()
    (run_dir,) = tmp_path.glob("outputs/toy/*")
    results.assert_same(
        results.weights(run_dir), results.weights(shared_run("recipe=toy", "topology.procs_per_node=4"))
    )
    logs = {file.name for file in (run_dir / "logs").glob("rank_*.log")}
    assert logs == {"rank_0.log", "rank_1.log", "rank_2.log", "rank_3.log"}
    assert results.run_file(run_dir)["status"] == "finished"


def test_hosts_with_one_secret_run_together(hosts: list[Host], tmp_path: Path) -> None:
    secret = "n0t-t0-be-seen"
    typed = f"topology.rdzv_secret={secret}"
    overrides = ("recipe=toy", "trainer.max_epochs=1", typed)
    with started_on_all(hosts, *overrides, cwd=tmp_path, secrets=(None, "typed ones count")) as all_started:
        all_started[0].wait_for_output("Training toy", timeout=START_S)
        for started in all_started:
            assert started.wait(timeout=START_S) == 0, started.printed()
            assert secret not in started.printed()
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert any(file.name == "config.yaml" for file in files)
    assert [file for file in files if secret.encode() in file.read_bytes()] == []


@pytest.mark.parametrize("secrets", [("one", "other"), ("one", None), (None, "other")])
def test_a_host_with_another_secret_is_refused(
    hosts: list[Host], tmp_path: Path, secrets: tuple[str | None, str | None]
) -> None:
    with started_on_all(hosts, "recipe=toy", cwd=tmp_path, secrets=secrets) as all_started:
        for started, host in zip(all_started, ("an unknown host", "host2"), strict=True):
            assert started.wait(timeout=START_S) == 2, started.printed()
            assert f"Node 1 on {host}:\n  its secret isn't node 0's: set FRAMEWORK_RDZV_SECRET" in started.stderr()
            started.assert_all_gone()
    assert not list(tmp_path.glob("outputs/*/*"))


def test_the_store_listens_on_one_address(hosts: list[Host], tmp_path: Path) -> None:
    with started_on_all(hosts[:1], "recipe=toy", "topology.nnodes=2", cwd=tmp_path, secrets=(None,)) as (started,):
        started.wait_for_output("Waiting for 1 more of 2 nodes", timeout=START_S)
        listening: list[str] = []
        deadline = time.monotonic() + START_S
        while not listening:
            assert time.monotonic() < deadline, started.printed()
            shown = subprocess.run(["ip", "netns", "exec", hosts[0].namespace, "ss", "-ltnH"], **OUTPUT).stdout
            listening = [line.split()[3] for line in shown.splitlines()]
        assert listening == [f"{hosts[0].address}:29400"]


@pytest.mark.parametrize("cut_node", [0, 1])
def test_both_sides_of_a_cut_link_report_it(hosts: list[Host], tmp_path: Path, cut_node: int) -> None:
    trouble.write_recipe(tmp_path, Fault(pause=PAUSE_S))
    with started_on_all(hosts, *LONG, f"backend.timeout={TIMEOUT_S}", cwd=tmp_path) as all_started:
        wait_for_step(tmp_path, all_started)
        hosts[cut_node].cut()
        for node, started in enumerate(all_started):
            assert started.wait(timeout=REPORT_S) == 1, started.printed()
            started.assert_all_gone()
            assert started.stderr().count("is out of reach") == 1, started.stderr()
            assert f"node {1 - node}" in started.stderr()
    for name, other in (("failure.json", 1), ("failure_node1.json", 0)):
        first = failure(tmp_path, name)["first"]
        assert (first["kind"], first["node"]) == ("unreachable", other)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Fault("SIGKILL", rank=3, phase="forward", step=20, pause=PAUSE_S), "signal"),
        (Fault("sleep", rank=2, phase="data", step=6), "hung"),
    ],
    ids=["killed", "hung"],
)
def test_both_terminals_name_the_failed_rank(hosts: list[Host], tmp_path: Path, fault: Fault, kind: str) -> None:
    trouble.write_recipe(tmp_path, fault)
    with started_on_all(hosts, *LONG, f"backend.timeout={TIMEOUT_S}", cwd=tmp_path) as all_started:
        done = trouble.wait_until_done(tmp_path, all_started[0], timeout=START_S)
        for started in all_started:
            assert started.wait(timeout=REPORT_S) == 1, started.printed()
            started.assert_all_gone()
            assert f"Rank {fault.rank} of 4 (pid {done['pid']})" in started.stderr()
            assert "node 1 (host2)" in started.stderr()
    first = failure(tmp_path)["first"]
    wanted = {"rank": fault.rank, "pid": done["pid"], "node": 1, "host": "host2", "local_rank": fault.rank - 2}
    wanted |= {"kind": kind, "signal": "SIGKILL" if kind == "signal" else None, "phase": fault.phase}
    assert {key: first[key] for key in wanted} == wanted
    assert kind == "signal" or "recipes/trouble.py" in first["stacks"]
    assert not (trouble.run_dir(tmp_path) / "failure_node1.json").exists()


@pytest.mark.parametrize(
    ("node", "number", "statuses"),
    [(0, signal.SIGINT, [75, 75]), (1, signal.SIGINT, [75, 75]), (1, signal.SIGKILL, [1, -signal.SIGKILL])],
)
def test_a_signal_to_one_node_ends_both(
    hosts: list[Host], tmp_path: Path, node: int, number: signal.Signals, statuses: list[int]
) -> None:
    """Ctrl-C leaves a checkpoint; a lost node leaves a report."""
    trouble.write_recipe(tmp_path, Fault(pause=PAUSE_S))
    with started_on_all(hosts, *LONG, f"backend.timeout={TIMEOUT_S}", cwd=tmp_path) as all_started:
        wait_for_step(tmp_path, all_started)
        all_started[node].process.send_signal(number)
        assert [started.wait(timeout=REPORT_S) for started in all_started] == statuses, all_started[0].printed()
        for started in all_started:
            started.assert_all_gone()
            assert "Traceback" not in started.stderr()
        assert statuses[0] == 75 or "node 1" in all_started[0].stderr()
    run_dir = trouble.run_dir(tmp_path)
    assert statuses[0] == 1 or len(results.saved_steps(run_dir)) == 1
    assert bool(list(run_dir.glob("failure*.json"))) is (statuses[0] == 1)
