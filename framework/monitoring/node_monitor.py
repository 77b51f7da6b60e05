"""Watches the ranks of one node through their rank statuses: progress, late and hung ranks, stop requests.

The launcher's parent process has one; ranks of torchrun or srun have one each, in a thread. It needs no store and no
other node, so it keeps working when the network is cut. Which ranks are late is decided in `late_ranks`, which one has
caused a failure in `failure`, from the statements that the monitors make.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

import psutil

from framework.monitoring.failure import failure_facts
from framework.monitoring.late_ranks import Progress, RankState, stuck_for, waited_for
from framework.monitoring.oom_kills import count_oom_kills, killed_since
from framework.monitoring.rank_status import CRASH, RankPhase, RankStatus, StatusPage
from framework.monitoring.stacks import Asked, ask_for_stacks, ask_workers_for_stacks, with_workers

# Without a check for so long, this process was stopped, and the ranks with it.
_PAUSE_S = 10.0
# Past the time-out, so that torch's own error comes first if there is one.
_HUNG_MARGIN_S = 5.0
# A rank whose heartbeat is older doesn't answer.
_SILENT_S = 2.0
_DUMP_TIMEOUT_S = 3.0
_POLL_S = 0.02
_LOG_TAIL_BYTES = 32_768
_ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
_USES_WORKERS = (RankPhase.DATA, RankPhase.EVALUATE)


@dataclass(frozen=True)
class RankInfo:
    """What is known of a rank before it starts."""

    rank: int
    local_rank: int
    devices: str
    log: str


@dataclass(frozen=True)
class Limits:
    """Seconds: the time-out until the first step is done, the one after it, and when a rank counts as late."""

    init_timeout_s: float
    timeout_s: float
    late_after_s: float


@dataclass
class _Rank:
    """A rank that is watched."""

    info: RankInfo
    status: RankStatus
    # When what is in `seen` last changed.
    since_s: float
    # How long the log was before this rank.
    log_from_bytes: int
    process: psutil.Process | None = None
    # In its control groups, when it was first seen.
    oom_kills: Mapping[Path, int] = field(default_factory=dict)
    seen: tuple[int, ...] = ()
    # By us, after it was stopped.
    was_continued: bool = False


@final
class NodeMonitor:
    """Watches one node's ranks from `add` on. Call `check` a few times a second.

    Args:
        own: the status of the rank in whose process this runs, if it is one of them.
    """

    def __init__(
        self,
        *,
        node: int,
        limits: Limits,
        own: RankStatus | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.node = node
        # The signal for which all ranks are to stop together; 0 for none.
        self.stop_signal = 0
        self._own = own
        self._clock = clock
        self._limits = limits
        self._ranks: dict[int, _Rank] = {}
        # An entry for each time that a rank was late, as in the failure report.
        self._late: list[dict[str, Any]] = []
        # Of the ranks that are late now: since when, and their entry.
        self._late_now: dict[int, tuple[float, dict[str, Any]]] = {}
        self._checked_s = clock()
        self._resumed_s = self._checked_s

    def add(self, info: RankInfo, status: RankStatus) -> None:
        log = Path(info.log)
        log_from_bytes = log.stat().st_size if log.exists() else 0
        self._ranks[info.rank] = _Rank(info, status, since_s=self._clock(), log_from_bytes=log_from_bytes)

    def check(self, *, elsewhere: Progress | None = None) -> list[dict[str, Any]]:
        """Return what is new, as `late`, `caught_up` and `hung` events.

        Args:
            elsewhere: the progress of the other nodes' ranks.
        """
        states = self.states()
        late, waited_s = waited_for(states, elsewhere=elsewhere)
        in_training = all(state.step > 0 for state in states)
        limit_s = self._limits.timeout_s if in_training else self._limits.init_timeout_s
        if len(states) > 1 or elsewhere is not None:
            limit_s += _HUNG_MARGIN_S

        # With a short time-out, a rank is late before it hangs nevertheless.
        is_late = waited_s >= min(self._limits.late_after_s, limit_s)
        late_ranks = {state.rank for state in late}
        events = list(self._note_late(states, late_ranks, seconds=waited_s if is_late else None))
        hung_s = max(waited_s, self._stuck_for(states))
        if hung_s > limit_s:
            events.append({"event": "hung", "seconds": hung_s})
        return events

    def states(self) -> list[RankState]:
        """Return every rank's present state."""
        return [self._state(rank) for rank in self._ranks.values()]

    def is_stoppable(self) -> bool:
        """Return True if every rank here would stop at the end of a step, or is done."""
        pages = [rank.status.read() for rank in self._ranks.values()]
        return bool(pages) and all(page.is_stoppable or page.is_done for page in pages)

    def is_stoppable_anywhere(self) -> bool:
        """Return True if a rank here would stop at the end of a step; then the others will, too."""
        return any(rank.status.read().is_stoppable for rank in self._ranks.values())

    def received_signal(self) -> int:
        """Return the signal by which a rank here was asked to stop, 0 for none."""
        for rank in self._ranks.values():
            signal_number: int = rank.status.read().received_signal
            if signal_number:
                return signal_number
        return 0

    def set_stop_signal(self, signal_number: int) -> None:
        """Tell the ranks here that all ranks are to stop."""
        self.stop_signal = signal_number
        for rank in self._ranks.values():
            rank.status.set_stop_signal(signal_number)

    def read(self, rank: int) -> StatusPage:
        return self._ranks[rank].status.read()

    def ranks_that_raised(self) -> list[int]:
        """Return the ranks that recorded an exception and have closed everything since."""
        return [number for number, rank in self._ranks.items() if rank.status.read().is_closed]

    def statement(self, exits: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
        """Return everything known of this node's ranks as plain types, for `failure.find_first`. Takes a second or two.

        Args:
            exits: how processes ended that weren't ended on purpose: status (None: unknown), time, early.
        """
        states = self.states()
        records = {number: rank.status.failure() for number, rank in self._ranks.items()}
        timeout_s = min(self._limits.timeout_s, self._limits.init_timeout_s)
        # Asking continues stopped ranks, so it is done after everything else was read.
        stacks = self._stacks(states, records, hanging_s=timeout_s / 2)
        self._await_dumps(states, records, exits)
        ranks = []
        for state in states:
            end = exits.get(state.rank)
            record = records[state.rank]
            ranks.append(self._rank_statement(state, end, record=record, stacks=stacks.get(state.rank)))
        return {
            "node": self.node,
            "time": time.time(),
            "timeout_s": timeout_s,
            "ranks": ranks,
            "late": self._late,
        }

    def close(self) -> None:
        for rank in self._ranks.values():
            rank.status.close()
        self._ranks.clear()

    # The present state

    def _state(self, rank: _Rank) -> RankState:
        now = self._clock()
        status = rank.status.read()
        seen = (status.phase, status.step, status.collectives, status.is_done, status.ticks, status.pid)
        if seen != rank.seen:
            rank.seen = seen
            rank.since_s = now

        process_status = self._process_status(rank, status.pid)
        alive = process_status not in _ENDED
        return RankState(
            rank=rank.info.rank,
            pid=status.pid,
            alive=alive,
            stopped=alive and (rank.was_continued or process_status in _STOPPED),
            phase=RankPhase(status.phase),
            step=status.step,
            collectives=status.collectives,
            still_s=now - rank.since_s,
            silent_s=now - status.beat_ns / 1e9 if status.pid else 0.0,
            done=bool(status.is_done),
        )

    def _process_status(self, rank: _Rank, pid: int) -> str:
        """Return the process status, one of psutil's; `running` if it hasn't started yet."""
        if not pid:
            return psutil.STATUS_RUNNING
        try:
            if rank.process is None:
                rank.process = psutil.Process(pid)
                rank.oom_kills = count_oom_kills(pid)
            if not rank.process.is_running():
                return psutil.STATUS_DEAD
            return rank.process.status()
        except psutil.NoSuchProcess:
            return psutil.STATUS_DEAD

    def _stuck_for(self, states: Sequence[RankState]) -> float:
        """Return `stuck_for`, without the time in which this process didn't run, as when the job was suspended."""
        now = self._clock()
        if now - self._checked_s > _PAUSE_S:
            self._resumed_s = now
        self._checked_s = now
        return min(stuck_for(states), now - self._resumed_s)

    def _note_late(
        self, states: Sequence[RankState], behind: set[int], *, seconds: float | None
    ) -> Iterator[dict[str, Any]]:
        """Yield `late` for the ranks behind, if `seconds` is given, and `caught_up` for those that were behind."""
        now = self._clock()
        for state in states:
            if state.rank in self._late_now:
                since_s, entry = self._late_now[state.rank]
                entry["seconds"] = round(now - since_s, 1)
                if state.rank not in behind:
                    del self._late_now[state.rank]
                    if state.alive or state.done:
                        yield {"event": "caught_up", **entry}
            elif state.rank in behind and seconds is not None:
                entry = {
                    "rank": state.rank,
                    "phase": RankPhase(state.phase).label,
                    "step": state.step,
                    "seconds": seconds,
                }
                self._late.append(entry)
                self._late_now[state.rank] = (now - seconds, entry)
                yield {"event": "late", **entry, "pid": state.pid}

    # After a failure

    def _rank_statement(
        self, state: RankState, end: Mapping[str, Any] | None, *, record: Mapping[str, Any] | None, stacks: str | None
    ) -> dict[str, Any]:
        """Return what is stated of one rank: its state, which rank it is and where it was, and how it failed."""
        rank = self._ranks[state.rank]
        log = ""
        pid = state.pid
        was_killed = False
        if end is not None:
            log = self._log_tail(rank)
            # It may have ended before it wrote its pid.
            pid = state.pid or end.get("pid", 0)
            # Without a status nothing but its log can say if a signal has ended it.
            is_unknown = end["status"] is None
            if is_unknown or end["status"] < 0:
                stacks = _crash_in(log)
            was_killed = is_unknown or end["status"] == -signal.SIGKILL
        place = {
            **asdict(rank.info),
            "node": self.node,
            "host": socket.gethostname(),
            "pid": pid,
            "phase": RankPhase(state.phase).label,
            "step": state.step,
        }
        oom = was_killed and killed_since(rank.oom_kills)
        facts = failure_facts(record, end, stacks=stacks, oom=oom, log=log)
        return {**asdict(state), "place": place, "failure": facts, "stacks": stacks}

    def _log_tail(self, rank: _Rank) -> str:
        """Return the end of what this rank has written to its log, which several attempts share."""
        log = Path(rank.info.log)
        try:
            with log.open("rb") as file:
                file.seek(max(rank.log_from_bytes, log.stat().st_size - _LOG_TAIL_BYTES))
                return file.read().decode(errors="replace")
        except OSError:
            return ""

    def _stacks(
        self, states: Sequence[RankState], records: Mapping[int, Mapping[str, Any] | None], *, hanging_s: float
    ) -> dict[int, str]:
        """Return the Python stacks of the living ranks, by rank; of a hanging rank those of its loader workers, too.

        A rank that recorded a failure isn't asked, as its traceback says more, unless it hangs in closing since.
        """
        hanging = {state.rank for state in states if state.still_s > hanging_s}
        asked: dict[int, Asked] = {}
        for state in states:
            rank = self._ranks[state.rank]
            is_asked = state.alive and (records[state.rank] is None or state.rank in hanging)
            if not is_asked or rank.process is None:
                continue
            asked[state.rank] = Asked(rank.status, rank.process, is_stopped=state.stopped)
            rank.was_continued = rank.was_continued or state.stopped
        stacks = ask_for_stacks(asked, own=self._own)

        for state in states:
            if state.rank in asked and state.rank in hanging and state.phase in _USES_WORKERS:
                rank_asked = asked[state.rank]
                workers = ask_workers_for_stacks(rank_asked.status, rank_asked.process)
                stacks[state.rank] = with_workers(stacks[state.rank], workers)
        return stacks

    def _await_dumps(
        self,
        states: Sequence[RankState],
        records: Mapping[int, Mapping[str, Any] | None],
        exits: Mapping[int, Mapping[str, Any]],
    ) -> None:
        """Have the living ranks dump their collectives, if the failure may be theirs, and wait until they have.

        A rank that holds the interpreter, or is stopped, can't.
        """
        raised = [record for record in records.values() if record is not None]
        is_of_peers = any(record["of_peers"] for record in raised)
        is_aborted = any(end["status"] == -signal.SIGABRT for end in exits.values())
        has_ended = bool(raised or exits)
        if has_ended and not is_of_peers and not is_aborted:
            return
        asked = [self._ranks[state.rank].status for state in states if state.alive and state.silent_s < _SILENT_S]
        for status in asked:
            status.request_dump()
        deadline = time.monotonic() + _DUMP_TIMEOUT_S
        while time.monotonic() < deadline:
            pages = [status.read() for status in asked]
            if all(page.is_dumped or not page.can_dump for page in pages):
                break
            time.sleep(_POLL_S)


def _crash_in(log: str) -> str | None:
    """Return what faulthandler wrote to the log of a process that a signal ended, or None."""
    begin = log.rfind(CRASH)
    if begin < 0:
        return None
    return log[begin:]
