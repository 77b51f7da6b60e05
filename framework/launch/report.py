"""One failure, one report: which rank was first, how, and where to read on. No torch: the parent shows it."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

# What gloo, NCCL and the store say to those whose peer is gone.
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket (closed|timeout)|pair closure"
    r"|timed out waiting|got 0 bytes|failed to recv|ncclRemoteError|remote process exited|not connected",
    re.IGNORECASE,
)
_NOTICE_S = 5.0  # how much later than its peers' errors the end of a process may be seen


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
        if self.status == 0:
            return "left early with exit status 0, before its work was done"
        if self.status < 0:
            name = _signal_name(-self.status)
            hint = " (the system's out-of-memory killer sends it too)" if name == "SIGKILL" else ""
            return f"killed by {name}{hint}"
        return f"left with exit status {self.status} without saying why"

    @property
    def is_lost_peer(self) -> bool:
        """Whether it raised because another rank was gone: a consequence, if that rank's end is known."""
        return self.exception is not None and _LOST_PEER.search(self.traceback or self.exception) is not None


@dataclass(frozen=True)
class FailureReport:
    """The first rank to fail and those that followed. `unsaved` says why there is no `failure.json`."""

    world_size: int
    first: RankFailure
    others: tuple[RankFailure, ...]
    unsaved: str | None = None

    def to_plain(self) -> dict[str, Any]:
        return {**asdict(self), "cause": self.first.cause}

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> FailureReport:
        others = tuple(RankFailure(**other) for other in plain["others"])
        return FailureReport(plain["world_size"], RankFailure(**plain["first"]), others, plain["unsaved"])

    def render(self) -> str:
        """The text for the terminal: an expected error is its message; any other one its traceback and where it was."""
        first = self.first
        unsaved = [] if self.unsaved is None else [self.unsaved]
        if first.expected and first.exception is not None:
            return "\n".join([first.exception, *unsaved])
        lines = [] if first.traceback is None else [first.traceback.rstrip()]
        lines.append(f"Rank {first.rank} of {self.world_size} (pid {first.pid}) failed first: {first.cause}")
        if self.others:
            lines.append(f"Followed by {_list_ranks([other.rank for other in self.others])}.")
        lines.append(f"Its log: {first.log}")
        return "\n".join([*lines, *unsaved])


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
    A rank that said nothing counts from the end of its process, which is seen later than peers notice it: it comes
    before those that raised at most `_NOTICE_S` earlier because a peer was gone. An exit with `early` is a failure
    whatever its status. `exits` must have none that the launcher itself caused.
    """
    said = {record["rank"]: record for record in records}
    ended = {end["rank"]: end for end in exits if end["status"] != 0 or end.get("early")}
    failures = [_merge(rank, said.get(rank), ended.get(rank)) for rank in said.keys() | ended.keys()]
    silent = [failure.time for failure in failures if failure.exception is None]

    def order(failure: RankFailure) -> tuple[bool, float, int]:
        follows = failure.is_lost_peer and any(time <= failure.time + _NOTICE_S for time in silent)
        return follows, failure.time, failure.rank

    first, *others = sorted(failures, key=order)
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
