"""Memory and utilization of GPUs (made up ones), at most once a second."""

from __future__ import annotations

import time

import pytest
import torch

from framework.monitoring.device_usage import DeviceUsage

PAIR = (torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cuda", 0))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1e9 * (1 + device.index))
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 40 + 20 * device.index)
    return now


def test_the_fullest_device_and_the_mean_utilization_once_a_second(clock: list[float]) -> None:
    usage = DeviceUsage(PAIR)
    assert usage.read() == {"device/memory_gb": 2.0, "device/utilization": 0.5}
    clock[0] += 0.5
    assert usage.read() == {}
    clock[0] += 0.5
    assert usage.read().keys() == {"device/memory_gb", "device/utilization"}


def test_the_cpu_has_nothing_to_read() -> None:
    assert DeviceUsage([torch.device("cpu")] * 2).read() == {}
