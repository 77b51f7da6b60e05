"""Memory of ranks and utilization of GPUs (made up ones), at most once a second."""

from __future__ import annotations

import time

import pytest
import torch

from tests.helpers.internals import Context, DeviceUsage, Topology

PAIR = (torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cuda", 0))


def usage_of(rank: int, *, devices: tuple[torch.device, ...], world_size: int) -> DeviceUsage:
    topology = Topology(nnodes=1, procs_per_node=world_size, gpus_per_node=0, span=1)
    return DeviceUsage(Context(topology, rank, rank, 0, devices=devices, backend="gloo"))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1e9 * (1 + device.index) * now[0])
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 40 + 20 * device.index)
    return now


def test_usage_is_sampled_once_a_second(clock: list[float]) -> None:
    usage = usage_of(0, devices=PAIR, world_size=1)
    assert usage.row() == [200.0]
    assert usage.values([200.0]) == {"device/memory_gb": 200.0, "device/utilization": 0.5}
    clock[0] += 0.5
    assert usage.row() == [200.0]
    assert usage.values([200.0]) == {}
    clock[0] += 0.5
    assert usage.row() == [202.0]
    assert usage.values([202.0]).keys() == {"device/memory_gb", "device/utilization"}


def test_the_cpu_has_resident_memory_of_each_rank() -> None:
    usage = usage_of(1, devices=(torch.device("cpu"),), world_size=3)
    first, own, last = usage.row()
    assert (first, last) == (0, 0)
    assert 0.05 < own < 50
    assert usage.values([own + 1, own, 0.5]) == {
        "device/memory_gb": own + 1,
        "device/memory_gb_rank_0": own + 1,
        "device/memory_gb_rank_1": own,
        "device/memory_gb_rank_2": 0.5,
    }
