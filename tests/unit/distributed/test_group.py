from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from framework.errors import RunError
from tests.helpers.contexts import CPU, cpu_context
from tests.helpers.internals import (
    BackendConfig,
    Context,
    Duration,
    Topology,
    backends,
    group_timeout,
    new_subgroup,
    process_group,
)


def backend(*, init_timeout_s: float = 20.0) -> BackendConfig:
    return BackendConfig(
        name="gloo",
        init_method="env",
        init_timeout=Duration(init_timeout_s),
        timeout=Duration(20.0),
    )


def test_a_single_rank_group_is_always_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    with process_group(cpu_context(), backend(), rendezvous=None):
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
        dist.all_reduce(torch.ones(2))
    assert not dist.is_initialized()
    destroy = dist.destroy_process_group

    def destroy_and_fail() -> None:
        destroy()
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(dist, "destroy_process_group", destroy_and_fail)
    with pytest.raises(ValueError, match="the cause"), process_group(cpu_context(), backend(), rendezvous=None):
        raise ValueError("the cause")
    assert not dist.is_initialized()


def test_further_groups_share_the_first_timeout() -> None:
    """Torch's own default is half an hour."""
    with process_group(cpu_context(), backend(init_timeout_s=7.0), rendezvous=None):
        assert group_timeout(new_subgroup([[0]], cpu_context())) == timedelta(seconds=7)


def test_the_gpu_is_chosen_before_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the first collective of every rank opens a context on GPU 0."""
    calls: list[tuple[str, object]] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: calls.append(("device", device)))
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **how: calls.append(("init", how["device_id"])))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append(("destroy", None)))
    gpus = (torch.device("cuda:2"), torch.device("cuda:3"))
    for devices in (gpus[:1], gpus, (CPU,)):
        context = Context(Topology(1, 2, 0, 1), 0, 0, 0, devices, "nccl")
        with process_group(context, backend(), rendezvous=None):
            pass
    assert calls == [
        ("device", gpus[0]),
        ("init", gpus[0]),
        ("destroy", None),
        ("device", gpus[0]),
        # A replica over several devices has no single one.
        ("init", None),
        ("destroy", None),
        ("init", None),
        ("destroy", None),
    ]


def test_gloo_serves_the_cpu_beside_nccl_if_asked() -> None:
    gpu = Context(Topology(1, 1, 1, 1), 0, 0, 0, (torch.device("cuda", 0),), "nccl")
    assert (backends(gpu, with_cpu=False), backends(gpu, with_cpu=True)) == ("nccl", "cuda:nccl,cpu:gloo")
    assert backends(cpu_context(), with_cpu=True) == "gloo"


def test_missing_ranks_are_reported_with_advice(tmp_path: Path) -> None:
    context = cpu_context(world_size=2)
    url = f"file://{tmp_path}/meeting"
    with (
        pytest.raises(RunError, match=r"(?s)Rank 0 of 2 could not join .* backend\.init_timeout=0\.3 s: .*other ranks"),
        process_group(context, backend(init_timeout_s=0.3), rendezvous=url),
    ):
        raise AssertionError("there was nobody to meet")
    assert not dist.is_initialized()
