"""Made-up statements of nodes' monitors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tests.helpers.internals import RankPhase, RankState, failure_facts

LOST_PEER = "RuntimeError: [pair.cc:538] Connection closed by peer [127.0.0.1]:81"
OF_PEERS = ("RuntimeError: [", "RuntimeError: Application timeout", "torch.distributed.")
"""How what torch's collectives and stores raise begins here."""
TIMED_OUT = "RuntimeError: [unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation to complete"


def state(rank: int, **changes: Any) -> RankState:
    """A rank that trains: in the backward pass of step 8, having begun 20 collectives."""
    said: dict[str, Any] = {
        "pid": 1000 + rank,
        "alive": True,
        "stopped": False,
        "phase": RankPhase.BACKWARD,
        "step": 7,
        "collectives": 20,
        "still_s": 0.1,
        "silent_s": 0.2,
    }
    return RankState(rank=rank, **{**said, **changes})


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


def observed(at: int | RankState, **changes: Any) -> dict[str, Any]:
    """Return what a monitor states about one rank. A rank with an `exit` isn't alive."""
    if isinstance(at, int):
        at = state(at, alive=changes.get("exit") is None)
    said = changes.pop("record", None)
    end = changes.pop("exit", None)
    stacks = changes.pop("stacks", None)
    place = {
        "rank": at.rank,
        "local_rank": at.rank,
        "pid": at.pid,
        "devices": "CPU",
        "phase": RankPhase(at.phase).label,
        "step": at.step,
        "log": f"logs/rank_{at.rank}.log",
    }
    facts = {name: changes.pop(name) for name in ("oom", "log") if name in changes}
    return {
        **asdict(at),
        "place": {**place, **changes},
        "failure": failure_facts(said, end, stacks=stacks, **facts),
        "stacks": stacks,
    }


def statement(
    *ranks: Mapping[str, Any], node: int = 0, time: float = 100.0, late: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    placed = [{**rank, "place": {**rank["place"], "node": node, "host": f"host{node}"}} for rank in ranks]
    return {"node": node, "time": time, "timeout_s": 20.0, "ranks": placed, "late": list(late)}
