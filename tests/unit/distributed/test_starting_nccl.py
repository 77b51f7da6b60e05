"""How NCCL is started, with a stand-in for torch's function: one process doesn't need it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from framework.errors import RunError
from tests.helpers.internals import BackendConfig, Context, Topology, process_group

AUTO = BackendConfig(name="auto", init_method="env", init_timeout=5, timeout=5)  # type: ignore[arg-type]
NCCL = BackendConfig(name="nccl", init_method="env", init_timeout=5, timeout=5)  # type: ignore[arg-type]


def context(*, world_size: int, span: int = 1) -> Context:
    topology = Topology(1, world_size, world_size * span, span)
    devices = tuple(torch.device("cuda", index) for index in range(span))
    return Context(topology, 0, 0, 0, devices, "nccl")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """The backends that were started, and with which device."""
    calls: list[tuple[str, Any]] = []
    monkeypatch.setattr(
        "torch.distributed.init_process_group",
        lambda backend, device_id=None, **_: calls.append((backend, device_id)),
    )
    monkeypatch.setattr("torch.distributed.destroy_process_group", lambda: None)
    monkeypatch.setattr("torch.accelerator.set_device_index", lambda _: None)
    return calls


@pytest.mark.parametrize(
    ("world_size", "span", "device"), [(1, 1, None), (2, 1, torch.device("cuda:0")), (1, 2, None), (2, 2, None)]
)
def test_only_several_processes_connect_at_once(
    started: list[tuple[str, Any]], world_size: int, span: int, device: torch.device | None
) -> None:
    with process_group(context(world_size=world_size, span=span), AUTO, rendezvous=None):
        pass
    assert started == [("nccl", device)]


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch, started: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    def start(backend: str, device_id: Any = None, **_: Any) -> None:
        started.append((backend, device_id))
        if "nccl" in backend:
            raise RuntimeError("NCCL can't be had")

    monkeypatch.setattr("torch.distributed.init_process_group", start)
    return started


def test_one_process_takes_gloo_and_says_so_once(
    broken: list[tuple[str, Any]], capfd: pytest.CaptureFixture[str]
) -> None:
    with process_group(context(world_size=1), AUTO, rendezvous=None):
        pass
    assert [backend for backend, _ in broken] == ["nccl", "gloo"]
    printed = capfd.readouterr().out
    assert printed.count("NCCL can't be had") == 1
    assert "gloo takes its place" in printed


def test_advice_mentions_other_ranks_only_if_present(broken: list[tuple[str, Any]]) -> None:
    with (
        pytest.raises(RunError, match="backend nccl could not start") as alone,
        process_group(context(world_size=1), NCCL, rendezvous=None),
    ):
        pass
    with (
        pytest.raises(RunError, match="could not join") as several,
        process_group(context(world_size=2), AUTO, rendezvous=None),
    ):
        pass
    assert ["other ranks" in str(error.value) for error in (alone, several)] == [False, True]
