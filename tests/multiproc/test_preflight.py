"""`job=preflight` and `preflight=true` as they are typed: one to three processes, faults, and three hosts."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import results
from tests.helpers.command import Started
from tests.helpers.network import Host, network
from tests.helpers.requirements import missing, require

pytestmark = [pytest.mark.multiproc, pytest.mark.usefixtures("own_state")]

Train = Callable[..., Path]
SMALL = ("recipe=toy", "preflight.seconds=0.3", "preflight.max_bytes=4096")
PREFLIGHT = ("job=preflight", *SMALL)
EXCHANGES = ["send/recv", "broadcast", "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "butterfly"]
START_S = 120.0


def found_in(run_dir: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run_dir / "preflight.json").read_text())
    return content


def entry(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the ranks run what is wrong."""
    monkeypatch.setattr("framework.jobs.preflight._ENTRY", f"tests.multiproc.preflight_entries:{name}")


def test_three_processes_talk(train: Train, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir = train(*PREFLIGHT, "topology.procs_per_node=3")
    found = found_in(run_dir)
    assert (found["passed"], found["failures"], found["faults"]) == (True, [], [])
    assert [rank["turn"] for rank in found["ranks"]] == [1, 2, 3]
    assert [link["ranks"] for link in found["links"]] == [[0, 1], [0, 2], [1, 2]]
    assert found["num_links"] == {"within_node": 3, "between_nodes": 0}
    assert all(len(link["round_trips_s"]) == 10 for link in found["links"])
    assert [check["name"] for check in found["checks"]] == EXCHANGES
    for check in found["checks"]:
        assert check["unsupported"] is None
        first = check["points"][0]
        assert first["size_bytes"] == 4
        assert first["bytes"] == (12 if check["name"] in EXCHANGES[3:6] else 4)
        assert first["algorithm_bytes_per_s"] == pytest.approx(first["bytes"] / first["seconds"])
        ring = first["bus_bytes_per_s"] / first["algorithm_bytes_per_s"]
        assert ring == pytest.approx({"send/recv": 1, "broadcast": 1, "all_reduce": 4 / 3, "butterfly": 4 / 3}.get(
            check["name"], 2 / 3))  # fmt: skip
    assert all(abs(rank["clock"]["ahead_s"]) <= rank["clock"]["error_s"] + 0.001 for rank in found["ranks"])
    late = [rank["late_sender"] for rank in found["ranks"]]
    assert [each and (each["source"], each["overlapped"]) for each in late] == [None, (0, True), (1, True)]
    assert results.run_file(run_dir)["results"] == {"passed": True}
    printed = capfd.readouterr().out
    assert "Preflight of toy: 3 processes, CPU" in printed
    assert "slowest link: rank " in printed
    assert "3 ranks, every value right" in printed


def test_one_process_is_looked_at_and_a_limit_is_kept(train: Train, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir = train(*PREFLIGHT, "launcher=in_place", "preflight.min_matmul=1e9", status=1)
    found = found_in(run_dir)
    assert [(each["check"], each["limit"]) for each in found["failures"]] == [("matmul", 1e9)]
    assert (found["links"], found["checks"]) == ([], [])
    assert "preflight.min_matmul allows 1,000,000,000 GFLOP/s at least" in capfd.readouterr().out


def test_what_is_wrong_is_named(
    train: Train, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    entry("corrupting", monkeypatch)
    run_dir = train(*PREFLIGHT, "topology.procs_per_node=3", status=1)
    found = found_in(run_dir)
    by_check = {(fault["check"], fault["rank"]) for fault in found["faults"]}
    assert by_check == {("ping-pong", 0), ("ping-pong", 1), ("send/recv", 0), ("send/recv", 2), ("all_gather", 1)}
    assert all(fault["text"].startswith("from rank 2: ") for fault in found["faults"] if fault["check"] == "ping-pong")
    assert [rank["late_sender"] and rank["late_sender"]["overlapped"] for rank in found["ranks"]] == [None, False, True]
    (held_up,) = (each["text"] for each in found["failures"] if each["check"] == "isend/irecv")
    assert held_up.startswith("irecv held rank 1 up for ")
    for number in range(3):  # the preflight's own group is gone when that of the run is, and before training
        assert json.loads((run_dir / f"groups_{number}.json").read_text()) == [2, 1]
    assert "Preflight failed" in capfd.readouterr().out


def test_a_hang_is_reported_with_the_name_of_the_check(
    train: Train, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    entry("hanging", monkeypatch)
    run_dir = train(*PREFLIGHT, "topology.procs_per_node=2", "backend.timeout=2", status=1)
    report = json.loads((run_dir / "failure.json").read_text())
    assert (report["first"]["rank"], report["first"]["kind"]) == (1, "hung")
    assert (report["first"]["phase"], report["first"]["waited_in"]) == ("preflight", "preflight")
    assert report["others"][0]["exception"].startswith("Preflight check broadcast failed on rank 0 of 2: ")
    printed = capfd.readouterr()
    assert "Rank 1 of 2" in printed.err
    assert "The preflight was at the check broadcast." in printed.out
    assert not (run_dir / "preflight.json").exists()


def logged(run_dir: Path) -> list[str]:
    return (run_dir / "logs" / "rank_0.log").read_text().splitlines()


def test_before_training(train: Train, capfd: pytest.CaptureFixture[str]) -> None:
    """In either order of keys; on going on it is done again, and what fails then trains nothing: not a second time
    either, where failures are restarted."""
    few = ("topology.procs_per_node=2", "trainer.max_epochs=1")
    run_dir = train("preflight.seconds=0.3", "preflight=true", "recipe=toy", "preflight.max_bytes=4096", *few)
    lines = logged(run_dir)
    (place,) = (number for number, line in enumerate(lines) if line.startswith("Preflight passed in "))
    assert lines[place + 1].startswith("slowest link: rank 0 – rank 1: ")
    assert "; slowest rank: " in lines[place + 1]
    assert any(line.startswith("ToyModel with ") for line in lines[place + 2 :])
    assert found_in(run_dir)["passed"] is True
    (run_dir / "preflight.json").unlink()
    typed = ("trainer.max_epochs=2", "preflight.min_bus_bandwidth=1e9", "launcher=elastic", "launcher.max_restarts=1")
    assert train(f"resume={run_dir}", *typed, status=1) == run_dir
    assert sum(line.startswith("Preflight failed in ") for line in logged(run_dir)) == 1
    said = capfd.readouterr().err
    assert "bus bandwidth: the bus bandwidth of all_reduce is " in said
    assert "Nothing was trained." in said
    assert [each["check"] for each in found_in(run_dir)["failures"]] == ["bus bandwidth"]
    assert results.results(run_dir)["steps"] > 0  # of the first time
    assert "restarts" not in results.run_file(run_dir)
    assert (run_dir / "failure.json").exists()


def throttle(host: Host, other: Host) -> None:
    """Hold what `host` sends to `other`, and nothing else of it, to 8 Mbit/s."""
    device, chosen = ("dev", "eth0"), ("u32", "match", "ip", "dst", f"{other.address}/32", "flowid", "1:1")
    for arguments in (
        ("qdisc", "add", *device, "root", "handle", "1:", "htb"),  # what no filter chooses is held to nothing
        ("class", "add", *device, "parent", "1:", "classid", "1:1", "htb", "rate", "8mbit"),
        ("filter", "add", *device, "protocol", "ip", "parent", "1:0", "prio", "1", *chosen),
    ):
        command = ["ip", "netns", "exec", host.namespace, "tc", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20.0, check=False)
        if done.returncode != 0:
            missing("netns", f"links can't be throttled here: tc {' '.join(arguments)}: {done.stderr.strip()}")


def of_elastic(node: int, endpoint: str) -> tuple[list[str], dict[str, str]]:
    place = [f"topology.node_rank={node}", f"topology.rdzv_endpoint={endpoint}"]
    return ["topology=multi_node", "topology.nnodes=3", "topology.procs_per_node=1", *place], {}


def of_kubernetes(rank: int, endpoint: str) -> tuple[list[str], dict[str, str]]:
    address, _, port = endpoint.partition(":")
    return [], {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": address, "MASTER_PORT": port}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("starting", [of_kubernetes, pytest.param(of_elastic, marks=pytest.mark.exhaustive)])
def test_a_slow_link_between_hosts_is_named(tmp_path: Path, starting: Callable[..., Any]) -> None:
    require("netns")
    with network(3) as hosts, ExitStack() as stack:
        throttle(hosts[1], hosts[2])
        limits = ("preflight.seconds=1", "preflight.max_bytes=65536", "preflight.min_link_bandwidth=5")

        def started(number: int) -> Started:
            own, environ = starting(number, f"{hosts[0].address}:29400")
            arguments = ("job=preflight", "recipe=toy", "trainer.gpus=0", *limits, *own)
            return stack.enter_context(hosts[number].started_framework(*arguments, cwd=tmp_path, env=environ))

        all_started = [started(number) for number in range(3)]
        statuses = [each.wait(timeout=START_S) for each in all_started]
        # Of ranks that something else has started, the first tells.
        assert statuses == ([1, 0, 0] if starting is of_kubernetes else [1, 1, 1]), all_started[0].printed()
        for each in all_started:
            each.assert_all_gone()
        (run_dir,) = tmp_path.glob("outputs/toy/preflight/*")
        found = found_in(run_dir)
        assert (found["slowest_link"]["ranks"], found["slowest_link"]["stands_out"]) == ([1, 2], True)
        assert [each["check"] for each in found["failures"]] == ["link bandwidth"]
        assert "slowest link: rank 1 (host2) – rank 2 (host3): " in all_started[0].stdout()
        assert ", which stands out" in all_started[0].stdout()
        for each in all_started if starting is of_elastic else all_started[:1]:
            assert "the link between rank 1 (host2) and rank 2 (host3) carries " in each.stdout()
