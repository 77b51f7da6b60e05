"""One failure, one report: which rank was first, where it was, why, and what to try. No torch: the parent shows it.

Every node's watcher makes a statement of its ranks (`NodeWatch.statement`); `make_report` merges them.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from framework.errors import EXIT_STOPPED
from framework.launch.advice import advice
from framework.launch.failure import Kind, RankFailure
from framework.launch.standing import Standing, behind, front

# What gloo, NCCL and the store, and nobody else, say to those whose peer is gone, and to those who waited in vain.
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|closed the connection|broken pipe|socket (closed|timeout)"
    r"|pair closure|timed out (waiting|after|while)|wait timeout|(got|sent) 0 bytes|failed to (recv|send)"
    r"|ncclRemoteError|remote process exited|communicator (was|is) aborted|not connected"
    r"|no route to host|network is unreachable|could not join the process group",
    re.IGNORECASE,
)
_TIMED_OUT = re.compile(r"timed out|time-?out|could not join the process group", re.IGNORECASE)
Told = tuple[Mapping[str, Any], Mapping[str, Any]]
"""A node's statement, and what it states of one of its ranks."""
CRASH = "Fatal Python error: "
"""How faulthandler begins when a signal ends the process."""
_CRASHES = {
    "Segmentation fault": "SIGSEGV",
    "Bus error": "SIGBUS",
    "Aborted": "SIGABRT",
    "Floating point exception": "SIGFPE",
    "Floating-point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}
_TIME_OUT = re.compile(r"(\d+) ?(ms|s|seconds)\b")
_WAITED_SHARE = 0.5  # of the time-out: who waited for less has not been waiting for somebody in vain
_NOTICE_S = 5.0  # how much later than its peers' errors the end of a process may be seen


@dataclass(frozen=True)
class FailureReport:
    """The first rank to fail, or that others waited for in vain, and those that followed.

    node: whose watcher made it. living: rank → stacks, of the other ranks that lived. late: who was waited for earlier
    in the run. file: where it was written, None where that failed, then `unsaved` says why.
    """

    world_size: int
    first: RankFailure
    others: tuple[RankFailure, ...]
    attempt: int = 0
    node: int = 0
    living: Mapping[str, str] = field(default_factory=dict)
    late: Sequence[Mapping[str, Any]] = ()
    file: str | None = None
    unsaved: str | None = None

    def to_plain(self) -> dict[str, Any]:
        return {
            "world_size": self.world_size,
            "attempt": self.attempt,
            "node": self.node,
            "first": self.first.to_plain(),
            "others": [other.to_plain() for other in self.others],
            "advice": advice(self.first, world_size=self.world_size),
            "living": dict(self.living),
            "late": [dict(each) for each in self.late],
            "file": self.file,
            "unsaved": self.unsaved,
        }

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> FailureReport:
        known = {key: value for key, value in plain.items() if key != "advice"}
        others = tuple(RankFailure.from_plain(other) for other in plain["others"])
        return FailureReport(**{**known, "first": RankFailure.from_plain(plain["first"]), "others": others})


def make_report(
    statements: Sequence[Mapping[str, Any]],
    *,
    world_size: int,
    attempt: int = 0,
    silent_nodes: Sequence[RankFailure] = (),
) -> FailureReport:
    """Merge what the nodes' watchers state into one order of events.

    silent_nodes: a failure of kind UNREACHABLE for each node that didn't answer. First is: the earliest rank that
    failed of itself; where all who failed had lost a peer or waited in vain, the living rank they waited for, else a
    node that is silent. The end of a process is seen later than its peers notice it, and nodes' clocks differ: a rank
    that failed of itself comes before those that lost a peer at most `_NOTICE_S` earlier.
    """
    statements = sorted(statements, key=lambda each: each["node"])
    told = [(statement, rank) for statement in statements for rank in statement["ranks"]]
    failures = [failure for statement, rank in told if (failure := _failure(statement, rank)) is not None]
    causes = [failure.time for failure in failures if not failure.lost_peer]

    def order(failure: RankFailure) -> tuple[bool, float, int]:
        follows = failure.lost_peer and any(time <= failure.time + _NOTICE_S for time in causes)
        return follows, failure.time, failure.rank

    ordered = sorted(failures, key=order)
    if not ordered:
        ordered = list(silent_nodes) or _waited_for(told, failures) or [_hardly_told(told)]
    elif ordered[0].lost_peer:
        waited_for = _waited_for(told, failures) or list(silent_nodes)
        told_ranks = {failure.rank for failure in waited_for}
        ordered = [*waited_for, *(failure for failure in ordered if failure.rank not in told_ranks)]
    else:
        ordered = [*ordered, *silent_nodes]
    first, *others = ordered
    living = [rank for _, rank in told if rank["standing"]["alive"] and rank["stacks"]]
    stacks = {str(rank["standing"]["rank"]): rank["stacks"] for rank in living}
    late = [each for statement in statements for each in statement["late"]]
    stacks.pop(str(first.rank), None)
    return FailureReport(world_size, first, tuple(others), attempt=attempt, living=stacks, late=late)


def _waited_for(told: Sequence[Told], failures: Sequence[RankFailure]) -> list[RankFailure]:
    """The living ranks that the others waited for in vain; of those that failed none, for that is told already.

    Where some have failed, nobody hung whom they had not waited for during a good part of the time-out.
    """
    if failures and not any(failure.timed_out for failure in failures):
        return []
    # One that lost a peer without waiting may be the very one: it came when the others had gone.
    failed = {failure.rank for failure in failures if failure.timed_out or not failure.lost_peer}
    standings = [Standing.from_plain(rank["standing"]) for _, rank in told]
    late = [each for each in behind(standings) if each.rank not in failed]
    late = sorted(late, key=lambda each: (not each.stopped, each.collectives, each.step, each.rank))
    late_ranks = {each.rank for each in late}
    waiting = [each for each in standings if each.rank not in late_ranks]
    foremost = max(waiting, key=lambda each: each.collectives, default=None)
    found = {rank["standing"]["rank"]: (statement, rank) for statement, rank in told}
    if failures and not any(_in_vain(found[each.rank][1]) for each in _foremost(waiting)):
        late = [each for each in late if each.stopped]
    waited_s = front(waiting).still_s or max((each.still_s for each in waiting), default=0.0)
    now = min((failure.time for failure in failures), default=_last_stated(told))
    return [
        _make(
            *found[each.rank],
            kind=Kind.STOPPED if each.stopped else Kind.HUNG,
            time=now,
            waited_s=None if foremost is None else waited_s,
            waited_in=None if foremost is None else foremost.phase.label,
            stacks=found[each.rank][1]["stacks"],
        )
        for each in late
    ]


def _foremost(waiting: Sequence[Standing]) -> list[Standing]:
    top = max((each.collectives for each in waiting), default=0)
    return [each for each in waiting if each.collectives == top]


def _in_vain(rank: Mapping[str, Any]) -> bool:
    """Whether the rank has stood still for a good part of the time-out: the one it was told of, where it was told."""
    said = "" if rank["record"] is None else rank["record"]["of_peers"]
    limit_s: float = min([rank["limit_s"], *_time_outs(said)])
    return Standing.from_plain(rank["standing"]).still_s >= _WAITED_SHARE * limit_s


def _time_outs(said: str) -> Iterator[float]:
    """Seconds that errors of torch's name: `Timed out waiting 3000ms`, `timed out after 4 seconds`."""
    for number, unit in _TIME_OUT.findall(said):
        yield int(number) / (1000 if unit == "ms" else 1)


def _last_stated(told: Sequence[Told]) -> float:
    return max((statement["time"] for statement, _ in told), default=0.0)


def _hardly_told(told: Sequence[Told]) -> RankFailure:
    """Where nobody failed and nobody is behind any more: the rank that was waited for longest, though it came at last;
    else the one that is least far."""
    late = {each["rank"]: each for statement, _ in told for each in statement["late"]}

    def order(found: Told) -> tuple[float, int, int]:
        standing = Standing.from_plain(found[1]["standing"])
        waited_s: float = late[standing.rank]["seconds"] if standing.rank in late else 0.0
        return -waited_s, standing.collectives, standing.step

    statement, rank = min(told, key=order)
    lateness = late.get(rank["standing"]["rank"])
    failure = _make(statement, rank, kind=Kind.HUNG, time=statement["time"], stacks=rank["stacks"])
    return failure if lateness is None else replace(failure, waited_s=lateness["seconds"], phase=lateness["phase"])


def _failure(statement: Mapping[str, Any], rank: Mapping[str, Any]) -> RankFailure | None:
    """How a rank failed of what is told of it; None where it didn't."""
    record, end = rank["record"], rank["exit"]
    bad_end = end is not None and (end["status"] not in (0, EXIT_STOPPED) or end.get("early", False))
    if record is not None:
        said = record["of_peers"]
        return _make(
            statement,
            rank,
            kind=Kind.EXCEPTION,
            status=None if end is None else end["status"],
            lost_peer=_LOST_PEER.search(said) is not None,
            timed_out=_TIMED_OUT.search(said) is not None,
            **{key: value for key, value in record.items() if key != "of_peers"},
        )
    if not bad_end:
        return None
    status = end["status"]
    ended_by = _signal(status, stacks=rank["stacks"] or "")
    return _make(
        statement,
        rank,
        kind=Kind.EXIT if ended_by is None else Kind.SIGNAL,
        time=end["time"],
        status=status,
        signal=ended_by,
        oom=rank["oom"],
        stacks=rank["stacks"],
        lost_peer=rank["nccl_timeout"],
        timed_out=rank["nccl_timeout"],
    )


def _signal(status: int | None, *, stacks: str) -> str | None:
    """The signal that ended a process: of its status, else by what faulthandler has written."""
    if status is not None:
        return signal_name(-status) if status < 0 else None
    return _CRASHES.get(stacks.removeprefix(CRASH).partition("\n")[0]) if stacks.startswith(CRASH) else None


def _make(statement: Mapping[str, Any], rank: Mapping[str, Any], **facts: Any) -> RankFailure:
    standing, end = rank["standing"], rank["exit"] or {}
    return RankFailure(
        rank=standing["rank"],
        node=statement["node"],
        host=statement["host"],
        local_rank=rank["local_rank"],
        pid=standing["pid"] or end.get("pid", 0),  # of one that ended before it said which process it was
        devices=rank["devices"],
        phase=standing["phase"],
        step=standing["step"],
        log=rank["log"],
        **facts,
    )


def signal_name(number: int) -> str:
    """`SIGKILL` of 9."""
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have none
        return f"signal {number}"


def innermost_frames(stacks: str) -> Iterator[str]:
    """Where each thread is, of what faulthandler wrote; a main thread that waits for others to end isn't told."""
    for thread in re.split(r"(?m)^.*hread 0x.*$", stacks)[1:]:
        frames = [line.strip() for line in thread.splitlines() if line.startswith("  File ")]
        if frames and not any(frame.endswith("in _shutdown") for frame in frames[:3]):
            yield frames[0]


def main_stack(stacks: str) -> Iterator[str]:
    """The lines that matter of what faulthandler wrote, innermost first: of the thread that crashed, else the main one.

    The main thread comes last, being the oldest. "Current" is whichever handled the signal.
    """
    mark = "Current thread " if stacks.startswith(CRASH) else "hread 0x"
    for line in stacks.rpartition(mark)[2].splitlines()[1:]:
        if not line.startswith("  File "):
            return
        yield line.strip()
