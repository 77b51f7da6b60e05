from __future__ import annotations

from typing import Any

import pytest

from framework.launch.advice import advice
from framework.launch.failure import Kind, RankFailure
from framework.pulse import Phase
from tests.unit.launch.statements import LOST_PEER, WAITED_IN_VAIN


def failure(kind: Kind, **facts: Any) -> RankFailure:
    at = {"rank": 1, "node": 0, "host": "a", "local_rank": 1, "pid": 7, "devices": "CPU", "phase": "data", "step": 4}
    return RankFailure(**{**at, "kind": kind, "time": 1.0, "log": "log", **facts})


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (failure(Kind.SIGNAL, signal="SIGKILL"), "no sign of it"),
        (failure(Kind.SIGNAL, signal="SIGKILL", oom=True), "data.batch_size"),
        (failure(Kind.EXIT, status=None, oom=True), "data.batch_size"),
        (failure(Kind.SIGNAL, signal="SIGSEGV"), "its log may say more"),
        (failure(Kind.SIGNAL, signal="SIGSEGV", stacks="…"), "the Python stack of that moment"),
        (failure(Kind.SIGNAL, signal="SIGBUS"), "/dev/shm"),
        (failure(Kind.SIGNAL, signal="SIGTERM"), "a signal to the command itself"),
        (failure(Kind.EXIT, status=0), "exit()"),
        (failure(Kind.STOPPED), "kill -STOP"),
        (failure(Kind.HUNG, phase="forward"), "raise backend.timeout"),
        (failure(Kind.HUNG, phase="data"), "data.num_workers=0 shows the line"),
        (failure(Kind.HUNG, phase="forward", step=0), "it is backend.init_timeout that counts"),
        (failure(Kind.HUNG, phase="starting", step=0), "raise backend.init_timeout"),
        (failure(Kind.UNREACHABLE, host=""), "node 0"),
        (failure(Kind.EXCEPTION, exception="torch.OutOfMemoryError: CUDA out of memory. Tried"), "data.batch_size"),
        (
            failure(Kind.EXCEPTION, exception="RuntimeError: DefaultCPUAllocator: can't allocate memory: you"),
            "data.batch_size",
        ),
        (failure(Kind.EXCEPTION, exception="RuntimeError: CUDA error: device-side assert triggered"), "CUDA_LAUNCH"),
        (
            failure(Kind.EXCEPTION, exception="RuntimeError: DataLoader worker (pid 9) is killed by signal: Killed."),
            "data.num_workers=0",
        ),
        (failure(Kind.EXCEPTION, exception=WAITED_IN_VAIN, lost_peer=True, timed_out=True), "different collectives"),
        (failure(Kind.EXCEPTION, exception=LOST_PEER, lost_peer=True), "look at the ends of their logs"),
    ],
)
def test_what_is_tried_fits_what_happened(first: RankFailure, words: str) -> None:
    assert words in advice(first, world_size=4)


@pytest.mark.parametrize(
    "first",
    [
        failure(Kind.EXCEPTION, exception="ValueError: no"),
        failure(Kind.EXCEPTION, exception="Not even a batch of 1 fits: CUDA out of memory", expected=True),
        failure(Kind.EXCEPTION, exception="could not join the process group", expected=True, lost_peer=True),
    ],
)
def test_an_error_that_says_everything_needs_none(first: RankFailure) -> None:
    assert advice(first, world_size=4) == ""


@pytest.mark.parametrize("phase", Phase)
def test_there_is_advice_for_a_hang_in_every_phase(phase: Phase) -> None:
    assert "timeout" in advice(failure(Kind.HUNG, phase=phase.label), world_size=2)
