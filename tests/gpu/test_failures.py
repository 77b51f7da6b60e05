"""Failures on a GPU: the report names the cause and what to do, and neither a process nor GPU memory is left."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import cases
from tests.helpers import trouble
from tests.helpers.command import run_framework
from tests.helpers.trouble import Fault

pytestmark = pytest.mark.multiproc

SLACK_BYTES = 64 << 20
WITHIN_S = 10.0


@pytest.fixture
def no_memory_left(gpus: int) -> Iterator[None]:
    """Fail the test if the GPU doesn't get its memory back within WITHIN_S."""
    if not gpus:
        yield
        return
    before, _ = torch.cuda.mem_get_info(0)
    yield
    deadline = time.monotonic() + WITHIN_S
    while (now := torch.cuda.mem_get_info(0)[0]) < before - SLACK_BYTES:
        assert time.monotonic() < deadline, f"{(before - now) / 1e9:.2f} GB of GPU memory are still taken"
        time.sleep(0.2)


@pytest.fixture
def failed(tmp_path: Path, train: Callable[..., Path]) -> Callable[..., dict[str, Any]]:
    """Runs a command that fails; gives its report. The command leaves no process.

    With GPUs it is a process of its own, which can't have used one before. A stand-in takes the fork server's ranks.
    """

    def run(*overrides: str, gpus: int) -> dict[str, Any]:
        if gpus:
            done = run_framework(*overrides, f"trainer.gpus={gpus}", cwd=tmp_path, timeout=100)
            assert done.returncode == 1, done.stdout + done.stderr
        else:
            train(*overrides, status=1)
        (file,) = tmp_path.glob("outputs/*/*/failure.json")
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    return run


@pytest.fixture
def report(failed: Callable[..., dict[str, Any]], gpus: int, no_memory_left: None) -> Callable[..., dict[str, Any]]:
    """The same on `gpus`, which has its memory back afterwards."""
    return partial(failed, gpus=gpus)


def faulty(what: str, **settings: object) -> tuple[str, ...]:
    keys = [f"+task.{key}={value}" for key, value in settings.items()]
    return ("recipe=toy", *cases.task("Faulty"), f"+task.what={what}", *keys)


def assert_index_out_of_range(report: dict[str, Any], *, gpus: int) -> None:
    """The report names the fault, whether the exception came first or NCCL's watchdog has ended the process."""
    if gpus:
        # A host that has run ahead may meet it in cuBLAS, which has another word for it.
        assert re.search(r"device-side assert|CUBLAS_STATUS_|CUDNN_STATUS_", report["first"]["cause"])
        assert "CUDA_LAUNCH_BLOCKING=1" in report["advice"]
    else:
        assert "IndexError" in report["first"]["cause"]


def test_out_of_memory(report: Callable[..., dict[str, Any]], gpus: int) -> None:
    found = report(*faulty("memory"))
    assert ("CUDA out of memory" if gpus else "can't allocate memory") in found["first"]["exception"]
    assert found["first"]["phase"] == "forward"
    assert "Lower data.batch_size" in found["advice"]
    memory = found["first"]["memory"]
    assert memory["by_category"]["weights"] >= 165 * 4
    if gpus:
        largest = memory["largest"][0]
        assert largest["category"] == "activations and temporaries"
        assert 0 < largest["size_bytes"] <= memory["allocated_bytes"] <= memory["capacity_bytes"]
        assert Path(memory["snapshot"]).is_file()
    # The task takes it, not the model; workspaces of cuBLAS are counted.
    assert found["forecast"]["peak_bytes"] < 1 << 30


def test_a_device_side_assert(report: Callable[..., dict[str, Any]], gpus: int) -> None:
    found = report(*faulty("index"))
    assert_index_out_of_range(found, gpus=gpus)
    assert ("device-side assert" if gpus else "IndexError") in found["first"]["exception"]


def test_a_device_side_assert_during_exchanges(report: Callable[..., dict[str, Any]], gpus: int) -> None:
    """Under DDP, NCCL's watchdog sees the error of the exchanges that follow, and ends the process 0.1 s later."""
    assert_index_out_of_range(report(*faulty("index", runs_ahead=True), "strategy=ddp"), gpus=gpus)


def test_a_device_side_assert_of_one_of_two(report: Callable[..., dict[str, Any]], gpus: int) -> None:
    """Both ranks share one GPU, so they communicate over gloo."""
    pair = ("topology.procs_per_node=2", "topology.gpus_per_process=1", f"topology.share_gpus={bool(gpus)}")
    found = report(*faulty("index", rank=1), *pair, "backend.timeout=20s")
    assert found["first"]["rank"] == 1
    assert_index_out_of_range(found, gpus=gpus)


def test_a_restart_after_a_cuda_error(tmp_path: Path, gpus: int, no_memory_left: None) -> None:
    restarts = ("launcher=elastic", "launcher.max_restarts=1", "checkpoint.every_n_steps=4", "strategy=ddp")
    length = ("trainer.max_epochs=1", "checkpoint.monitor=null", f"trainer.gpus={gpus}")
    done = run_framework(*faulty("index", step=10, once=True), *restarts, *length, cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.glob("outputs/*/*/failure_attempt_0.json")
    assert_index_out_of_range(json.loads(file.read_text()), gpus=gpus)
    run = json.loads(file.with_name("run.json").read_text())
    assert (run["status"], len(run["restarts"]), run["results"]["steps"]) == ("finished", 1, 80)
    assert re.search(r"Restart 1: resuming after step [48]\b", done.stdout), done.stdout


@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_a_device_assert_in_process_is_reported(tmp_path: Path, gpus: int, no_memory_left: None, strategy: str) -> None:
    """With `launcher=in_process` there is no monitor: Python's own traceback is the only report, and the run ends."""
    place = ("launcher=in_process", f"trainer.gpus={gpus}", f"strategy={strategy}")
    done = run_framework(*faulty("index"), *place, cwd=tmp_path, timeout=100)
    assert done.returncode != 0
    assert ("device-side assert" if gpus else "IndexError") in done.stdout + done.stderr


def test_a_kill_in_backward(report: Callable[..., dict[str, Any]], gpus: int, tmp_path: Path) -> None:
    trouble.write_recipe(tmp_path, Fault("SIGKILL", phase="backward", step=3))
    first = report("recipe=trouble", "strategy=ddp")["first"]
    assert (first["kind"], first["signal"], first["phase"]) == ("signal", "SIGKILL", "backward")


def test_a_hang_of_one_of_two(report: Callable[..., dict[str, Any]], gpus: int, tmp_path: Path) -> None:
    """Both ranks share one GPU, so they communicate over gloo."""
    trouble.write_recipe(tmp_path, Fault("sleep", rank=1, phase="forward", step=3))
    pair = ("topology.procs_per_node=2", "topology.gpus_per_process=1", f"topology.share_gpus={bool(gpus)}")
    found = report("recipe=trouble", *pair, "backend.timeout=5s")
    first = found["first"]
    assert (first["rank"], first["kind"], first["phase"]) == (1, "hung", "forward")
    assert first["stacks"]
    assert found["advice"].startswith("Its stack shows where it is")


def test_a_device_assert_of_one_rank_is_reported(failed: Callable[..., dict[str, Any]], two_gpus: int) -> None:
    pair = ("topology.procs_per_node=2", "backend.timeout=20s")
    found = failed(*faulty("index", rank=1, runs_ahead=True), *pair, gpus=two_gpus)
    assert found["first"]["rank"] == 1
    assert_index_out_of_range(found, gpus=two_gpus)


@pytest.mark.parametrize("what", ["SIGKILL", "sleep"])
def test_one_of_two_ranks_with_a_gpu_each(
    failed: Callable[..., dict[str, Any]], two_gpus: int, tmp_path: Path, what: str
) -> None:
    """During NCCL: the other one waits in its all-reduce, or finds its peer gone."""
    trouble.write_recipe(tmp_path, Fault(what, rank=1, phase="forward", step=3))
    pair = ("topology.procs_per_node=2", "backend.timeout=5s")
    first = failed("recipe=trouble", *pair, gpus=two_gpus)["first"]
    assert (first["rank"], first["kind"]) == (1, "signal" if what == "SIGKILL" else "hung")
