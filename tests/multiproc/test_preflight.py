"""`job=preflight` and `preflight=true` as they are typed: one to five processes, faults, and three hosts."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import results
from tests.helpers.network import Host, network
from tests.helpers.requirements import missing, require

pytestmark = [pytest.mark.multiproc, pytest.mark.usefixtures("own_state")]

Train = Callable[..., Path]
CASES = "tests.multiproc.preflight_cases"
PREFLIGHT = ("job=preflight", "recipe=toy", "preflight.seconds=0.3", "preflight.max_bytes=4096")
THREE = "topology.procs_per_node=3"
# For three ranks, following https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.
BUS_FACTORS = {
    "send/recv": 1,
    "broadcast": 1,
    "all_reduce": 4 / 3,
    "reduce_scatter": 2 / 3,
    "all_gather": 2 / 3,
    "all_to_all": 2 / 3,
    "butterfly": 4 / 3,
}
START_S = 120.0


def found_in(run_dir: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run_dir / "preflight.json").read_text())
    return content


def test_three_processes_talk(train: Train, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir = train(*PREFLIGHT, THREE)
    found = found_in(run_dir)
    assert (found["passed"], found["failures"], found["faults"]) == (True, [], [])
    assert [link["ranks"] for link in found["links"]] == [[0, 1], [0, 2], [1, 2]]
    assert found["num_links"] == {"within nodes": 3, "between nodes": 0}
    assert all(len(link["round_trips_s"]) == 10 for link in found["links"])
    assert [check["name"] for check in found["checks"]] == list(BUS_FACTORS)
    for check in found["checks"]:
        in_parts = check["name"] in ("reduce_scatter", "all_gather", "all_to_all")
        first = check["points"][0]
        assert (first["size_bytes"], first["bytes"]) == (4, 12 if in_parts else 4)
        assert first["algorithm_bytes_per_s"] == pytest.approx(first["bytes"] / first["seconds"])
        assert first["bus_bytes_per_s"] / first["algorithm_bytes_per_s"] == pytest.approx(BUS_FACTORS[check["name"]])
        assert [point["size_bytes"] for point in check["points"]] == [4, 16, 64, 256, 1024, 4096]
    (device,) = found["ranks"][2]["devices"]
    assert device["device"] == "cpu"
    assert found["ranks"][2]["free_disk_bytes"] > 0
    assert found["slowest_device"]["flops_per_s"] == min(rank["matmul"][0]["flops_per_s"] for rank in found["ranks"])
    assert results.run_file(run_dir)["results"] == {"passed": True}
    printed = capfd.readouterr().out
    assert "Preflight of toy: 3 processes, CPU" in printed
    assert "slowest link: rank " in printed
    assert "3 ranks, every value right" in printed


def test_limits_hold_for_one_process_too(train: Train, capfd: pytest.CaptureFixture[str]) -> None:
    limits = ("preflight.min_matmul=1e9", "preflight.min_free_disk=1e9")
    run_dir = train(*PREFLIGHT, "launcher=in_process", *limits, status=1)
    found = found_in(run_dir)
    assert [(each["check"], each["limit"]) for each in found["failures"]] == [("matmul", 1e9), ("free_disk", 1e9)]
    assert (found["links"], found["checks"]) == ([], [])
    assert "preflight.min_matmul allows 1,000,000,000 GFLOP/s at least" in capfd.readouterr().out


def test_what_is_wrong_is_named(train: Train, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir = train(*PREFLIGHT, THREE, f"strategy={{_target_: {CASES}.faulty}}", status=1)
    found = found_in(run_dir)
    faults = {(fault["check"], fault["rank"]) for fault in found["faults"]}
    expected = {("ping-pong", 0), ("ping-pong", 1), ("send/recv", 0), ("all_gather", 1)}
    # The sum includes what rank 2 sends.
    assert faults == expected | {("butterfly", rank) for rank in range(3)}
    assert all(fault["text"].startswith("from rank 2: ") for fault in found["faults"] if fault["check"] == "ping-pong")
    assert (found["slowest_link"]["ranks"], found["slowest_link"]["stands_out"]) == ([1, 2], True)
    printed = capfd.readouterr().out
    (verdict,) = (line for line in printed.splitlines() if line.startswith("Preflight failed in "))
    assert verdict.endswith(": ping-pong, send/recv, butterfly, all_gather")
    assert "slowest link: rank 1 – rank 2: " in printed


@pytest.mark.exhaustive
def test_a_hang_is_reported_with_its_check(train: Train, capfd: pytest.CaptureFixture[str]) -> None:
    strategy = f"strategy={{_target_: {CASES}.hanging}}"
    run_dir = train(*PREFLIGHT, "topology.procs_per_node=2", strategy, "backend.timeout=2", status=1)
    report = json.loads((run_dir / "failure.json").read_text())
    assert (report["first"]["rank"], report["first"]["kind"]) == (1, "hung")
    assert (report["first"]["phase"], report["first"]["waited_in"]) == ("preflight", "preflight")
    assert report["others"][0]["exception"].startswith("Preflight check broadcast failed on rank 0 of 2: ")
    assert "Rank 1 of 2" in capfd.readouterr().err
    assert not (run_dir / "preflight.json").exists()


RESTARTED = ("launcher=elastic", "launcher.max_restarts=1")


@pytest.mark.exhaustive
@pytest.mark.parametrize("launcher", [(), RESTARTED], ids=["", "restarted"])
def test_before_training(train: Train, capfd: pytest.CaptureFixture[str], launcher: tuple[str, ...]) -> None:
    """A resumed run checks again; a failed check trains nothing, and isn't repeated where failures are restarted."""
    few = ("topology.procs_per_node=2", "trainer.max_epochs=1", "preflight.max_bytes=4096", "preflight.seconds=0.3")
    run_dir = train("recipe=toy", "preflight=true", *few)
    lines = results.log(run_dir).splitlines()
    (place,) = (number for number, line in enumerate(lines) if line.startswith("Preflight passed in "))
    assert lines[place + 1].startswith("slowest link: rank 0 – rank 1: ")
    assert any(line.startswith("  ToyModel ") for line in lines[place + 2 :])
    assert found_in(run_dir)["passed"] is True
    steps = results.results(run_dir)["steps"]
    typed = ("trainer.max_epochs=2", "preflight.min_bus_bandwidth=1e9")
    assert train(f"resume={run_dir}", *typed, *launcher, status=1) == run_dir
    assert sum(line.startswith("Preflight failed in ") for line in results.log(run_dir).splitlines()) == 1
    printed = capfd.readouterr().err
    assert "bus bandwidth: all_reduce: " in printed
    assert "Nothing was trained." in printed
    assert [each["check"] for each in found_in(run_dir)["failures"]] == ["bus bandwidth"]
    assert results.results(run_dir)["steps"] == steps > 0
    assert "restarts" not in results.run_file(run_dir)
    assert (run_dir / "failure.json").exists()


def throttle(host: Host, other: Host) -> None:
    """Hold what `host` sends to `other`, and nothing else of it, to 8 Mbit/s."""
    device = ("dev", "eth0")
    chosen = ("u32", "match", "ip", "dst", f"{other.address}/32", "flowid", "1:1")
    for arguments in (
        # Traffic that no filter chooses isn't limited.
        ("qdisc", "add", *device, "root", "handle", "1:", "htb"),
        ("class", "add", *device, "parent", "1:", "classid", "1:1", "htb", "rate", "8mbit"),
        ("filter", "add", *device, "protocol", "ip", "parent", "1:0", "prio", "1", *chosen),
    ):
        command = ["ip", "netns", "exec", host.namespace, "tc", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20.0, check=False)
        if done.returncode != 0:
            missing("netns", f"links can't be throttled here: tc {' '.join(arguments)}: {done.stderr.strip()}")


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_a_slow_link_between_hosts_is_named(tmp_path: Path) -> None:
    require("netns")
    with network(3) as hosts, ExitStack() as stack:
        throttle(hosts[1], hosts[2])
        limits = ("preflight.seconds=1", "preflight.max_bytes=65536", "preflight.min_link_bandwidth=5")
        command = ("job=preflight", "recipe=toy", "trainer.gpus=0", *limits)
        kubernetes = {"WORLD_SIZE": "3", "MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29400"}
        all_started = [
            stack.enter_context(host.started_framework(*command, cwd=tmp_path, env={**kubernetes, "RANK": str(rank)}))
            for rank, host in enumerate(hosts)
        ]
        statuses = [each.wait(timeout=START_S) for each in all_started]
        # The first host reports.
        assert statuses == [1, 0, 0], all_started[0].printed()
        for each in all_started:
            each.assert_all_gone()
        (run_dir,) = tmp_path.glob("outputs/toy/preflight/*")
        found = found_in(run_dir)
        assert (found["slowest_link"]["ranks"], found["slowest_link"]["stands_out"]) == ([1, 2], True)
        assert [each["check"] for each in found["failures"]] == ["link bandwidth"]
        assert all(abs(rank["clock"]["ahead_s"]) < 0.5 for rank in found["ranks"])
        printed = all_started[0].stdout()
        assert "slowest link: rank 1 (host2) – rank 2 (host3): " in printed
        assert "link bandwidth: rank 1 (host2) – rank 2 (host3): " in printed
