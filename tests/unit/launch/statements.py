"""What the watchers of nodes state, made up for the tests of what is made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from framework.launch.standing import Standing
from framework.pulse import Phase

LOST_PEER = "RuntimeError: [pair.cc:538] Connection closed by peer [127.0.0.1]:81"
OF_PEERS = ("RuntimeError: [", "RuntimeError: Application timeout", "torch.distributed.")
"""How what torch's collectives and stores raise begins here."""
WAITED_IN_VAIN = "RuntimeError: [unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation to complete"


def standing(rank: int, **changes: Any) -> Standing:
    """A rank that trains: in the backward pass of step 8, having begun 20 collectives."""
    said: dict[str, Any] = {
        "pid": 1000 + rank,
        "alive": True,
        "stopped": False,
        "phase": Phase.BACKWARD,
        "step": 7,
        "collectives": 20,
        "still_s": 0.1,
        "silent_s": 0.2,
    }
    return Standing(rank=rank, **{**said, **changes})


def record(*, time: float, error: str = "ValueError: no", **changes: Any) -> dict[str, Any]:
    """What a rank that raised leaves behind."""
    said = {
        "time": time,
        "exception": error,
        "traceback": f"Traceback (most recent call last):\n  File x\n{error}\n",
        "of_peers": error if error.startswith(OF_PEERS) else "",
        "expected": False,
        "exit_status": 1,
    }
    return {**said, **changes}


def end(*, time: float, status: int | None, early: bool = False) -> dict[str, Any]:
    """What was seen of the end of a process."""
    return {"status": status, "time": time, "early": early}


def told(at: int | Standing, **changes: Any) -> dict[str, Any]:
    """What is stated of one rank; one that is said to have ended isn't alive."""
    if isinstance(at, int):
        at = standing(at, alive=changes.get("exit") is None)
    said = {
        "standing": at.to_plain(),
        "local_rank": at.rank,
        "devices": "CPU",
        "log": f"logs/rank_{at.rank}.log",
        "limit_s": 20.0,
        "exit": None,
        "record": None,
        "stacks": None,
        "oom": False,
        "nccl_timeout": False,
    }
    return {**said, **changes}


def statement(
    *ranks: Mapping[str, Any], node: int = 0, time: float = 100.0, late: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    return {"node": node, "host": f"host{node}", "time": time, "ranks": list(ranks), "late": list(late)}
