"""Failures on a GPU: the report names the cause and what to do, and neither a process nor GPU memory is left."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import cases
from tests.helpers import trouble
from tests.helpers.command import run_framework
from tests.helpers.trouble import Deed

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
def report(tmp_path: Path, gpus: int, no_memory_left: None) -> Callable[..., dict[str, Any]]:
    """Runs a command that fails; gives its report. The command leaves no process."""

    def run(*overrides: str) -> dict[str, Any]:
        done = run_framework(*overrides, f"trainer.gpus={gpus}", cwd=tmp_path, timeout=100)
        assert done.returncode == 1, done.stdout + done.stderr
        (file,) = tmp_path.glob("outputs/*/*/failure.json")
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    return run


def faulty(what: str) -> tuple[str, ...]:
    return ("recipe=toy", *cases.task("Faulty"), f"+task.what={what}")


def test_out_of_memory(report: Callable[..., dict[str, Any]], gpus: int) -> None:
    found = report(*faulty("memory"))
    assert ("CUDA out of memory" if gpus else "can't allocate memory") in found["first"]["exception"]
    assert found["first"]["phase"] == "forward"
    assert "Lower data.batch_size" in found["advice"]


def test_a_device_side_assert(report: Callable[..., dict[str, Any]], gpus: int) -> None:
    found = report(*faulty("index"))
    if gpus:
        assert "device-side assert" in found["first"]["exception"]
        assert "CUDA_LAUNCH_BLOCKING=1" in found["advice"]
    else:
        assert "IndexError" in found["first"]["exception"]


def test_a_kill_in_backward(report: Callable[..., dict[str, Any]], gpus: int, tmp_path: Path) -> None:
    trouble.write_recipe(tmp_path, Deed("SIGKILL", phase="backward", step=3))
    first = report("recipe=trouble", "strategy=ddp")["first"]
    assert (first["kind"], first["signal"], first["phase"]) == ("signal", "SIGKILL", "backward")


def test_a_hang_of_one_of_two(report: Callable[..., dict[str, Any]], gpus: int, tmp_path: Path) -> None:
    """On one GPU, so over gloo."""
    trouble.write_recipe(tmp_path, Deed("sleep", rank=1, phase="forward", step=3))
    pair = ("topology.procs_per_node=2", "topology.gpus_per_process=1", f"topology.share_gpus={bool(gpus)}")
    found = report("recipe=trouble", *pair, "backend.timeout=5s")
    first = found["first"]
    assert (first["rank"], first["kind"], first["phase"]) == (1, "hung", "forward")
    assert first["stacks"]
    assert found["advice"].startswith("Its stack shows where it is")


@pytest.mark.parametrize("what", ["SIGKILL", "sleep"])
def test_one_of_two_ranks_with_a_gpu_each(two_gpus: int, tmp_path: Path, what: str) -> None:
    """During NCCL: the other one waits in its all-reduce, or finds its peer gone."""
    trouble.write_recipe(tmp_path, Deed(what, rank=1, phase="forward", step=3))
    pair = (f"trainer.gpus={two_gpus}", "topology.procs_per_node=2", "backend.timeout=5s")
    done = run_framework("recipe=trouble", *pair, cwd=tmp_path, timeout=100)
    assert done.returncode == 1, done.stdout + done.stderr
    first = json.loads((trouble.run_dir(tmp_path) / "failure.json").read_text())["first"]
    assert (first["rank"], first["kind"]) == (1, "signal" if what == "SIGKILL" else "hung")
