"""Decide how a run failed: how each rank did, and which one is to blame.

How one rank failed follows from what it raised, how its process ended and what its log says (`failure_facts`). Every
node's monitor states that of its ranks, and `find_first` merges the statements: first is the rank that failed by
itself, or the one that the others waited for. Which ranks those are is decided in `late_ranks`.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

from framework.errors import EXIT_STOPPED
from framework.monitoring.late_ranks import RankState, max_progress, ranks_behind, stuck_for
from framework.monitoring.rank_status import CRASH
from framework.monitoring.stacks import hook_in

# Of the time-out: a rank that waited for less wasn't waiting for a hung one.
_WAITED_SHARE = 0.5
# How much later than its peers' errors the end of a process may be seen.
_NOTICE_S = 5.0
OUT_OF_MEMORY = re.compile(r"out of memory|(can't allocate|not enough) memory|std::bad_alloc|_STATUS_ALLOC_FAILED")
"""What torch, its libraries and allocators say in such an error."""


class FailureKind(str, Enum):
    """How a rank failed. The value is what `failure.json` says."""

    EXCEPTION = "exception"
    EXIT = "exit"
    SIGNAL = "signal"
    HUNG = "hung"
    STOPPED = "stopped"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True)
class RankFailure:
    """One rank's failure."""

    rank: int
    kind: FailureKind
    node: int
    # Seconds since the epoch.
    time: float
    log: str
    host: str = ""
    local_rank: int = 0
    pid: int = 0
    devices: str = ""
    phase: str = "unknown"
    # Optimizer steps done.
    step: int = 0
    # Of the process, minus the number of a signal; None while it lives, or if unknown.
    status: int | None = None
    # `RuntimeError: message`.
    exception: str | None = None
    traceback: str | None = None
    # Of a callback, logger or task, that raised, hung or crashed: `EarlyStopping.on_validation_end`, or where only a
    # stack was written, `on_validation_end at mine.py:12`.
    hook: str | None = None
    # It is a FrameworkError: its message says everything.
    expected: bool = False
    exit_status: int = 1
    # Another attempt would fail with the same error.
    is_final: bool = False
    signal: str | None = None
    oom: bool = False
    # Why compiled code aborted it, as far as its log says.
    said: str | None = None
    # How long the others waited for it.
    waited_s: float | None = None
    # Of a rank that hung and nobody waited for: how long it has made no progress.
    still_s: float | None = None
    # Of all threads, when the report was made, or when compiled code crashed.
    stacks: str | None = None
    # The phase in which the others waited.
    waited_in: str | None = None
    # It failed because another rank was gone or didn't come: a consequence.
    lost_peer: bool = False
    timed_out: bool = False
    # Of one that ran out of memory while it trained: what it had allocated, see `engine.out_of_memory`.
    memory: Mapping[str, Any] | None = None

    @property
    def is_independent(self) -> bool:
        """True if the rank failed by itself, not because of another one."""
        has_ended = self.kind in (FailureKind.EXCEPTION, FailureKind.EXIT, FailureKind.SIGNAL)
        return has_ended and not self.lost_peer and not self.timed_out

    @property
    def may_disagree(self) -> bool:
        """True if the ranks may have called different collectives."""
        return self.timed_out or self.kind is FailureKind.HUNG or MISMATCH in (self.said or "")

    @property
    def cause(self) -> str:
        """What happened, in a few words."""
        match self.kind:
            case FailureKind.EXCEPTION:
                return str(self.exception)
            case FailureKind.EXIT if self.status == 0:
                return "exited with status 0 before its work was done"
            case FailureKind.EXIT if self.status is not None:
                return f"exited with status {self.status} and without an error"
            case FailureKind.EXIT | FailureKind.SIGNAL:
                return self._end_in_words()
            case FailureKind.UNREACHABLE:
                silent = ""
                if self.waited_s and self.waited_s >= 1:
                    silent = f" for {self.waited_s:.0f} s"
                return f"its node hasn't answered{silent}: link cut, machine down, or its processes gone"
            case _:
                return self._hang_in_words()

    def _end_in_words(self) -> str:
        if self.signal is None:
            text = "its process is gone: killed, or exited without an error"
        else:
            text = f"killed by {self.signal}"
        if self.said is not None:
            text += f": {self.said}"
        if self.oom:
            text += "; the system was out of memory"
        return text

    def _hang_in_words(self) -> str:
        text = "was stopped (SIGSTOP)" if self.kind is FailureKind.STOPPED else "hung"
        if self.still_s is not None:
            text += f": no progress for {self.still_s:.0f} s"
        elif self.waited_s is not None:
            text += f"; the others waited {self.waited_s:.0f} s"
        if self.waited_in is not None:
            text += f" in {self.waited_in}"
        return text

    def to_plain(self) -> dict[str, Any]:
        return {**asdict(self), "cause": self.cause}

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> RankFailure:
        known = {key: value for key, value in plain.items() if key != "cause"}
        return RankFailure(**{**known, "kind": FailureKind(plain["kind"])})


# How one rank failed

# What only gloo, NCCL and the store say: to a rank whose peer is gone, and to one whose wait timed out.
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|closed the connection|broken pipe|socket (closed|timeout)"
    r"|pair closure|timed out (waiting|after|while)|wait timeout|(got|sent) 0 bytes|failed to (recv|send)"
    r"|ncclRemoteError|remote process exited|communicator (was|is) aborted|not connected"
    r"|no route to host|network is unreachable|could not join the process group",
    re.IGNORECASE,
)
MISMATCH = "collective mismatch"
"""What gloo says when it aborts a rank that receives more than it expects."""
_NCCL_TIMEOUT = "Watchdog caught collective operation timeout"
# What torch's threads print before they abort the process: a GPU error, or else the error of NCCL's watchdog.
_ABORTED = (
    re.compile(r"(?:CUDA|HIP) error: .*"),
    re.compile(r"watchdog thread terminated with exception: (.*)"),
    re.compile(r".*device-side assert.*"),
    re.compile(rf"enforce fail at .*?\] (.*{MISMATCH}.*)"),
)
_TIMED_OUT = re.compile(r"timed out|time-?out|could not join the process group", re.IGNORECASE)
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)
CRASH_SIGNALS = frozenset(number.name for number in _CRASHES)
"""Names of the signals by which compiled code ends its process."""
# By what faulthandler writes when one comes, such as `Segmentation fault`.
_CRASH_WORDS = {signal.strsignal(number): number.name for number in _CRASHES}


def failure_facts(
    record: Mapping[str, Any] | None,
    end: Mapping[str, Any] | None,
    *,
    stacks: str | None = None,
    oom: bool = False,
    log: str = "",
) -> dict[str, Any] | None:
    """Return how a rank failed, as fields of `RankFailure`; None if it hasn't failed by itself.

    Args:
        record: what it raised, as `RankStatus.record_failure` was given it.
        end: how its process ended: status (None: unknown), time, early.
        stacks: written when compiled code crashed, or of a rank that raised and has hung since.
        log: the end of what it printed, compiled code too.
    """
    if record is not None:
        of_peers = record["of_peers"]
        known = {key: value for key, value in record.items() if key != "of_peers"}
        return {
            **known,
            "kind": FailureKind.EXCEPTION,
            "status": None if end is None else end["status"],
            "stacks": stacks if end is None else None,
            "lost_peer": _LOST_PEER.search(of_peers) is not None,
            "timed_out": _TIMED_OUT.search(of_peers) is not None,
        }
    if end is None or (end["status"] in (0, EXIT_STOPPED) and not end["early"]):
        return None
    ended_by = _signal(end["status"], stacks or "")
    said = None
    if ended_by == "SIGABRT":
        said = _said_before_abort(log)
    nccl_timeout = _NCCL_TIMEOUT in log
    return {
        "kind": FailureKind.EXIT if ended_by is None else FailureKind.SIGNAL,
        "time": end["time"],
        "status": end["status"],
        "signal": ended_by,
        "oom": oom,
        "said": said,
        "hook": hook_in(stacks),
        "stacks": stacks,
        "lost_peer": nccl_timeout or _LOST_PEER.search(said or "") is not None,
        "timed_out": nccl_timeout,
    }


def _said_before_abort(log: str) -> str | None:
    """Return why torch aborted the process, as far as the end of its log says; else None."""
    for pattern in _ABORTED:
        match = pattern.search(log)
        if match:
            return match[match.lastindex or 0].strip()
    return None


def _signal(status: int | None, stacks: str) -> str | None:
    """Return the signal that ended a process, by its exit status or else by what faulthandler wrote."""
    if status is None:
        if not stacks.startswith(CRASH):
            return None
        words = stacks.removeprefix(CRASH).partition("\n")[0]
        return _CRASH_WORDS.get(words.replace("-", " "))
    if status >= 0:
        return None
    try:
        return signal.Signals(-status).name
    except ValueError:
        # Most real-time signals have no name.
        return f"signal {-status}"


# Which rank is to blame


@dataclass(frozen=True)
class Verdict:
    """The ranks that failed, and what is known of the others."""

    # The one to blame.
    first: RankFailure
    others: tuple[RankFailure, ...]
    # The stacks of the other ranks that lived, by rank.
    living: Mapping[str, str]
    # Ranks that others waited for earlier in the run.
    late: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class _StatedRank(RankState):
    """What is stated of one rank; see `NodeMonitor.statement`."""

    stated_s: float
    # The shorter one of that in set-up and that in training.
    timeout_s: float
    # Which rank it is and where it was, as fields of RankFailure.
    place: Mapping[str, Any]
    # How it failed by itself, as further fields.
    failure: Mapping[str, Any] | None
    stacks: str | None


def find_first(statements: Sequence[Mapping[str, Any]], *, silent_nodes: Sequence[RankFailure] = ()) -> Verdict:
    """Merge the statements of all nodes, and decide which rank is to blame.

    First is the earliest rank that failed by itself. If all that failed had lost a peer or timed out, it is the living
    rank they waited for, else a silent node.

    Args:
        silent_nodes: a failure of kind UNREACHABLE for each node that didn't answer.
    """
    ranks: list[_StatedRank] = []
    late: list[Mapping[str, Any]] = []
    for statement in sorted(statements, key=lambda statement: int(statement["node"])):
        for rank in statement["ranks"]:
            ranks.append(_StatedRank(**rank, stated_s=statement["time"], timeout_s=statement["timeout_s"]))
        late += statement["late"]

    failures = [RankFailure.from_plain({**rank.place, **rank.failure}) for rank in ranks if rank.failure is not None]
    failures = _causes_first(failures)
    if not failures:
        ordered = list(silent_nodes) or _hung(ranks, failures) or [_fallback_suspect(ranks, late)]
    elif failures[0].lost_peer:
        hung = _hung(ranks, failures) or list(silent_nodes)
        hung_ranks = {failure.rank for failure in hung}
        ordered = [*hung, *(failure for failure in failures if failure.rank not in hung_ranks)]
    else:
        ordered = [*failures, *silent_nodes]

    first = ordered[0]
    living: dict[str, str] = {}
    for state in ranks:
        if state.alive and state.stacks and state.rank != first.rank:
            living[str(state.rank)] = state.stacks
    return Verdict(first, tuple(ordered[1:]), living=living, late=late)


def _causes_first(failures: Sequence[RankFailure]) -> list[RankFailure]:
    """Return the failures by their time, but consequences of another one after it.

    The end of a process is seen later than its peers notice it, and nodes' clocks differ, so a rank that failed by
    itself comes before those that lost a peer up to `_NOTICE_S` earlier.
    """
    cause_times = [failure.time for failure in failures if not failure.lost_peer]

    def order(failure: RankFailure) -> tuple[bool, float, int]:
        is_consequence = failure.lost_peer and any(time <= failure.time + _NOTICE_S for time in cause_times)
        return is_consequence, failure.time, failure.rank

    return sorted(failures, key=order)


def _hung(ranks: Sequence[_StatedRank], failures: Sequence[RankFailure]) -> list[RankFailure]:
    """Return the living ranks that the others waited for.

    If some have failed, no rank hung unless they had waited for a good part of the time-out.
    """
    if failures and not any(failure.timed_out for failure in failures):
        return []
    # A rank that lost a peer without waiting may be the one: it came when the others had gone.
    failed = {failure.rank for failure in failures if failure.timed_out or not failure.lost_peer}
    late = [rank for rank in ranks_behind(ranks) if rank.rank not in failed]
    waiting = [rank for rank in ranks if rank not in late]
    progress = max_progress(waiting)
    furthest = [rank for rank in waiting if rank.collectives == progress.collectives]
    if failures and not any(rank.still_s >= _WAITED_SHARE * rank.timeout_s for rank in furthest):
        late = [rank for rank in late if rank.stopped]

    # If all of the furthest have ended, the others waited for as long as the one that waited longest.
    waited_s = progress.still_s or max((rank.still_s for rank in waiting), default=0.0)
    time = max((rank.stated_s for rank in ranks), default=0.0)
    if failures:
        time = min(failure.time for failure in failures)
    return [
        RankFailure(
            **rank.place,
            kind=FailureKind.STOPPED if rank.stopped else FailureKind.HUNG,
            time=time,
            waited_s=waited_s if furthest else None,
            waited_in=furthest[0].place["phase"] if furthest else None,
            **_where(rank),
        )
        for rank in sorted(late, key=_most_behind_first)
    ]


def _where(rank: _StatedRank) -> dict[str, Any]:
    """Return what shows where a rank was while others waited for it, as fields of RankFailure.

    One that waited elsewhere, as in another group, has raised when the others were gone. Its stack is of its closing.
    """
    if rank.failure is None:
        return {"hook": hook_in(rank.stacks), "stacks": rank.stacks}
    return {name: rank.failure.get(name) for name in ("exception", "traceback", "hook")}


def _most_behind_first(rank: _StatedRank) -> tuple[bool, int, int, int]:
    return not rank.stopped, rank.collectives, rank.step, rank.rank


def _fallback_suspect(ranks: Sequence[_StatedRank], late: Sequence[Mapping[str, Any]]) -> RankFailure:
    """Return the rank that makes no progress though nobody waits for it; else the one that was waited for longest."""
    working = [rank for rank in ranks if rank.alive and not rank.done]
    longest = max(late, key=lambda entry: float(entry["seconds"]), default=None)
    is_stuck = stuck_for(working) > _WAITED_SHARE * min(rank.timeout_s for rank in ranks)
    if longest is None or is_stuck:
        suspect = min(working or ranks, key=lambda rank: (rank.collectives, rank.step))
        return replace(_hang_of(suspect), still_s=suspect.still_s)
    suspect = next(rank for rank in ranks if rank.rank == longest["rank"])
    return replace(_hang_of(suspect), waited_s=longest["seconds"], phase=longest["phase"])


def _hang_of(rank: _StatedRank) -> RankFailure:
    return RankFailure(
        **rank.place,
        kind=FailureKind.HUNG,
        time=rank.stated_s,
        hook=hook_in(rank.stacks),
        stacks=rank.stacks,
    )
