from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from framework.errors import ConfigError, PreflightError, RunError
from tests.helpers.internals import MonitorLink, RankArguments, RankStatus, Topology, run_entry
from tests.unit.launch.statements import TIMED_OUT

DATABASE = "the feature database: timed out waiting for an answer"
GLOO = TIMED_OUT.removeprefix("RuntimeError: ")


Record = Callable[[Callable[[], object]], dict[str, Any]]


@pytest.fixture
def record() -> Iterator[Record]:
    """What a rank leaves whose entry calls something."""
    rank_status = RankStatus()
    reader = RankStatus.of_process(os.getpid(), rank_status.fd)
    arguments = RankArguments("nowhere", Topology(1, 1, 0, 1), rank=0, rendezvous=None)
    module = types.ModuleType("entry_of_a_test")
    sys.modules[module.__name__] = module

    def of(call: Callable[[], object]) -> dict[str, Any]:
        module.main = lambda *_: call()  # type: ignore[attr-defined]
        status = run_entry(f"{module.__name__}:main", arguments, MonitorLink(rank_status, pytest.fail))
        said = reader.failure()
        assert said is not None
        assert said["exit_status"] == status
        return said

    yield of
    del sys.modules[module.__name__]
    reader.close()
    rank_status.close()


def throw(error: BaseException) -> None:
    raise error


def throw_in(module: str, error: BaseException) -> Callable[[], object]:
    """Return a function that raises an error as code of that module would."""
    made = types.ModuleType(module)
    exec("def throw(error): raise error", made.__dict__)
    return lambda: made.throw(error)


def time_out() -> None:
    """Wait for a key that no other rank sets, until the time-out."""
    dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(milliseconds=50)).get("never set")


def in_database() -> None:
    throw(RuntimeError(DATABASE))


def wrapped() -> None:
    try:
        time_out()
    except RuntimeError:
        throw(KeyError("training failed"))


def in_work_of_gloo() -> None:
    """`work.wait()` in the user's code leaves no frame of torch's."""
    throw(RuntimeError(GLOO))


def forgotten() -> None:
    try:
        time_out()
    except RuntimeError:
        raise RuntimeError(DATABASE) from None


def in_backward() -> None:
    value = torch.ones(1, requires_grad=True)
    value.register_hook(lambda _: in_database())
    value.sum().backward()


@pytest.mark.parametrize(
    ("module", "is_of_peers"),
    [
        ("torch.distributed.distributed_c10d", True),
        ("torch.autograd.graph", True),
        ("framework.distributed.collectives", True),
        ("framework.strategies.ddp", True),
        ("torch.distributed_mine", False),
        ("recipes.mine", False),
    ],
)
def test_errors_of_torchs_collectives_are_recognised(record: Record, module: str, is_of_peers: bool) -> None:
    """The innermost frame of Python is in one of these modules; C++ adds none."""
    said = record(throw_in(module, RuntimeError(DATABASE)))
    assert (said["of_peers"], said["exception"]) == (DATABASE if is_of_peers else "", f"RuntimeError: {DATABASE}")


@pytest.mark.parametrize(
    ("call", "of_peers"),
    [
        (time_out, "wait timeout after 50ms"),
        (wrapped, "wait timeout after 50ms"),
        (in_database, ""),
        (in_work_of_gloo, GLOO),
        (forgotten, ""),
        (in_backward, ""),
    ],
)
def test_a_wrapped_lost_peer_is_recognised(record: Record, call: Callable[[], object], of_peers: str) -> None:
    said = record(call)["of_peers"]
    assert of_peers in said
    assert bool(said) is bool(of_peers)


@pytest.mark.parametrize(
    ("error", "is_final", "status"),
    [
        (ConfigError("no"), True, 2),
        (PreflightError("slow"), True, 1),
        (RunError("no"), False, 1),
        (OSError(), False, 1),
    ],
)
def test_permanent_errors_are_marked_final(record: Record, error: Exception, is_final: bool, status: int) -> None:
    said = record(lambda: throw(error))
    assert (said["is_final"], said["exit_status"]) == (is_final, status)
