from __future__ import annotations

import os
import types
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from framework.config.schema import BackendConfig, BackendName, Duration, InitMethod
from framework.errors import ConfigError, PreflightError, RunError
from framework.launch.link import Link
from framework.launch.worker import _record
from framework.pulse import Pulse, PulseReader
from tests.unit.launch.statements import LOST_PEER, WAITED_IN_VAIN

DATABASE = "the feature database: timed out waiting for an answer"
GLOO = WAITED_IN_VAIN.removeprefix("RuntimeError: ")


@pytest.fixture
def record() -> Iterator[Callable[[Callable[[], object]], dict[str, Any]]]:
    """What a rank leaves that calls something."""
    pulse = Pulse()
    reader = PulseReader.of_process(os.getpid(), pulse.fd)

    def of(call: Callable[[], object]) -> dict[str, Any]:
        try:
            call()
        except BaseException as error:
            _record(error, link=Link(pulse, pytest.fail), status=1)
        said = reader.failure()
        assert said is not None
        return said

    yield of
    reader.close()
    pulse.close()


def throw(error: BaseException) -> None:
    raise error


def throw_in(module: str, error: BaseException) -> Callable[[], object]:
    """As code of that module raises it, in C++ perhaps."""
    made = types.ModuleType(module)
    exec("def throw(error): raise error", made.__dict__)
    return lambda: made.throw(error)


def wait_for_nobody() -> None:
    """As rank 0 of 2."""
    dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(milliseconds=50)).get("never set")


def in_database() -> None:
    throw(RuntimeError(DATABASE))


def wrapped_from() -> None:
    try:
        wait_for_nobody()
    except RuntimeError as error:
        raise KeyError("training failed") from error


def wrapped() -> None:
    try:
        wait_for_nobody()
    except RuntimeError:
        throw(KeyError("training failed"))


def forgotten() -> None:
    try:
        wait_for_nobody()
    except RuntimeError:
        raise RuntimeError(DATABASE) from None


def in_backward() -> None:
    class Mine(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value * 2

        @staticmethod
        def backward(_ctx: Any, *_: torch.Tensor) -> None:
            in_database()

    loss = Mine.apply(torch.ones(1, requires_grad=True))
    loss.sum().backward()


def in_a_circle() -> None:
    one, other = RuntimeError("one"), RuntimeError("other")
    one.__cause__, other.__cause__ = other, one
    throw(one)


@pytest.mark.parametrize(
    ("module", "is_of_peers"),
    [
        ("torch.distributed.distributed_c10d", True),
        ("torch.autograd.graph", True),
        ("torch.nn.parallel.distributed", True),
        ("framework.distributed.collectives", True),
        ("framework.strategies.ddp", True),
        ("torch.nn.modules.linear", False),
        ("torch.distributed_mine", False),
        ("recipes.mine", False),
    ],
)
def test_what_torchs_collectives_raise_is_known_by_the_module(record: Any, module: str, is_of_peers: bool) -> None:
    """The innermost frame of Python is in one of these modules; C++ adds none."""
    said = record(throw_in(module, RuntimeError(DATABASE)))
    assert (said["of_peers"], said["exception"]) == (DATABASE if is_of_peers else "", f"RuntimeError: {DATABASE}")


@pytest.mark.parametrize(
    ("call", "of_peers"),
    [
        (wait_for_nobody, "wait timeout after 50ms"),
        (wrapped_from, "wait timeout after 50ms"),
        (wrapped, "wait timeout after 50ms"),
        (in_database, ""),
        (forgotten, ""),
        (in_backward, ""),
        (in_a_circle, ""),
    ],
)
def test_the_loss_of_a_peer_is_found_whatever_is_wrapped_around_it(record: Any, call: Any, of_peers: str) -> None:
    said = record(call)["of_peers"]
    assert of_peers in said
    assert bool(said) is bool(of_peers)


@pytest.mark.parametrize("said", [GLOO, LOST_PEER.removeprefix("RuntimeError: ")])
def test_gloo_is_known_by_its_words_if_the_user_waits_for_its_work(record: Any, said: str) -> None:
    """`work.wait()` in the user's code leaves no frame of torch's."""
    assert record(lambda: throw(RuntimeError(said)))["of_peers"] == said


def test_a_rank_that_could_not_join_the_group_waited_for_others(record: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from framework.distributed import group

    context = types.SimpleNamespace(device=torch.device("cpu"), backend="gloo", rank=0, world_size=2)
    limit = Duration(1.0)
    settings = BackendConfig(name=BackendName.GLOO, init_method=InitMethod.ENV, init_timeout=limit, timeout=limit)
    monkeypatch.setattr(group, "_init", lambda *_, **__: throw(RuntimeError("nobody came")))

    def call() -> None:
        with group.process_group(context, settings, rendezvous="env://"):  # type: ignore[arg-type]
            pass

    said = record(call)
    assert "could not join the process group" in said["of_peers"]
    assert said["expected"]
    own = record(lambda: throw(RunError("could not join the process group of friends")))
    assert own["of_peers"] == ""


@pytest.mark.parametrize(
    ("error", "is_final"),
    [(ConfigError("no"), True), (PreflightError("slow"), True), (RunError("no"), False), (ValueError("no"), False)],
)
def test_what_would_fail_again_in_the_same_way_says_so(
    record: Callable[[Callable[[], object]], dict[str, Any]], error: Exception, is_final: bool
) -> None:
    assert record(lambda: throw(error))["is_final"] is is_final
