"""One failure, one report: which rank was first, how, and where to read on. No torch: the parent shows it."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class RankFailure:
    """One rank's end. `status` is an exit status or minus a signal number; `exception` is None for a silent death."""

    rank: int
    pid: int
    time: float
    status: int
    exception: str | None  # "RuntimeError: message"
    traceback: str | None
    expected: bool  # a FrameworkError: its message says everything
    exit_status: int
    log: str

    @property
    def cause(self) -> str:
        if self.exception is not None:
            return self.exception
        if self.status < 0:
            name = _signal_name(-self.status)
            hint = " (the system's out-of-memory killer sends it too)" if name == "SIGKILL" else ""
            return f"killed by {name}{hint}"
        return f"left with exit status {self.status} without saying why"


@dataclass(frozen=True)
class FailureReport:
    """The first rank to fail and those that followed, in the order of time."""

    world_size: int
    first: RankFailure
    others: tuple[RankFailure, ...]

    def to_plain(self) -> dict[str, Any]:
        return {**asdict(self), "cause": self.first.cause}

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> FailureReport:
        others = tuple(RankFailure(**other) for other in plain["others"])
        return FailureReport(plain["world_size"], RankFailure(**plain["first"]), others)

    def render(self) -> str:
        """The text for the terminal: an expected error is its message; any other one its traceback and where it was."""
        first = self.first
        if first.expected and first.exception is not None:
            return first.exception
        lines = [] if first.traceback is None else [first.traceback.rstrip()]
        lines.append(f"Rank {first.rank} of {self.world_size} (pid {first.pid}) failed first: {first.cause}")
        if self.others:
            lines.append(f"Followed by {_list_ranks([other.rank for other in self.others])}.")
        lines.append(f"Its log: {first.log}")
        return "\n".join(lines)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have none
        return f"signal {number}"


def _list_ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def make_report(
    records: Sequence[Mapping[str, Any]], exits: Sequence[Mapping[str, Any]], *, world_size: int
) -> FailureReport:
    """Merge what ranks said (`records`) with how their processes ended (`exits`) into one order of time.

    A rank that raised wrote its record before it left, so before its peers could notice; its record's time counts.
    A rank that said nothing counts from the end of its process.
    """
    said = {record["rank"]: record for record in records}
    ended = {end["rank"]: end for end in exits if end["status"] != 0}
    failures = [_merge(rank, said.get(rank), ended.get(rank)) for rank in said.keys() | ended.keys()]
    first, *others = sorted(failures, key=lambda failure: (failure.time, failure.rank))
    return FailureReport(world_size, first, tuple(others))


def _merge(rank: int, record: Mapping[str, Any] | None, end: Mapping[str, Any] | None) -> RankFailure:
    known = {**(end or {}), **(record or {})}
    return RankFailure(
        rank=rank,
        pid=known["pid"],
        time=known["time"],
        status=1 if end is None else end["status"],
        exception=known.get("exception"),
        traceback=known.get("traceback"),
        expected=known.get("expected", False),
        exit_status=known.get("exit_status", 1),
        log=known["log"],
    )
