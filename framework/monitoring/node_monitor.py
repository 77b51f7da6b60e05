"""Watches the ranks of one node through their rank statuses: progress, late and hung ranks, stop requests, stacks.

The launcher's parent process has one; ranks of torchrun or srun have one each, in a thread. It needs no store and no
other node, so it keeps working when the network is cut.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar, final

import psutil

from framework.monitoring.failure import failure_facts
from framework.monitoring.rank_status import CRASH, STACKS_SIGNAL, RankPhase, RankStatus, StatusPage, with_workers
from framework.system.hardware import control_groups

_STACKS_TIMEOUT_S = 1.5
_STACKS_POLL_S = 0.02
_WORKER_STACKS_TIMEOUT_S = 0.3
_MAX_WORKERS_ASKED = 8  # of a rank
_PAUSE_S = 10.0  # without a check: this process was stopped, and the ranks with it
_LOG_TAIL_BYTES = 32_768
_ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
_HUNG_MARGIN_S = 5.0  # past the time-out, so that torch's own error comes first if there is one


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


@dataclass(frozen=True)
class RankState:
    """A rank as its node's monitor sees it."""

    rank: int
    pid: int
    alive: bool
    stopped: bool  # by SIGSTOP or a debugger
    phase: int  # a RankPhase
    step: int
    collectives: int
    still_s: float  # since phase, step, collectives, done or the ticks within a phase last changed
    silent_s: float  # since the last heartbeat
    done: bool = False  # its work is done, it only has to leave


State = TypeVar("State", bound=RankState)


# Which ranks the others wait for: pure functions of what was seen.


@dataclass(frozen=True)
class Progress:
    """Of the ranks that are furthest: how many collectives they have begun, and for how long nothing has changed."""

    collectives: int
    still_s: float


def max_progress(states: Sequence[RankState]) -> Progress:
    """Return the progress of these ranks. An ended rank counts for its collectives, but doesn't wait."""
    top = max((each.collectives for each in states), default=0)
    waiting = [each.still_s for each in states if each.alive and each.collectives == top]
    return Progress(top, min(waiting, default=0.0))


def ranks_behind(states: Sequence[State], *, elsewhere: int = 0) -> list[State]:
    """Return the living ranks that others wait for; none if they can't be distinguished.

    These are the stopped ranks, unless all of several are, as when a job is suspended; and those that are behind: until
    the process group is formed, the ranks that haven't come to it; then those that have begun fewer collectives. A rank
    that waits in one has begun it, so it is never blamed.

    Args:
        elsewhere: the most collectives begun by ranks that aren't among `states`.
    """
    working = [each for each in states if each.alive and not each.done]
    stopped = [each for each in working if each.stopped]
    if len(stopped) == len(working) > 1:
        stopped = []
    return stopped + [each for each in _behind(states, elsewhere=elsewhere) if each in working and each not in stopped]


def waited_for(states: Sequence[RankState], *, elsewhere: Progress | None = None) -> tuple[list[RankState], float]:
    """Return the ranks behind, and for how many seconds all others have waited for them; 0 if nobody waits.

    Args:
        elsewhere: the progress of the ranks that aren't among `states`.
    """
    theirs = 0 if elsewhere is None else elsewhere.collectives
    late, top = ranks_behind(states, elsewhere=theirs), _top(states, theirs)
    waits = [
        each.still_s
        for each in states
        if each not in late and (each.done or (each.alive and (top > 0 or each.phase == RankPhase.MEETING)))
    ]
    if elsewhere is not None and theirs == top > 0:
        waits.append(elsewhere.still_s)
    if not late or not waits:
        return late, 0.0
    if not any(each in late for each in _behind(states, elsewhere=theirs)):
        waits.append(max(each.silent_s for each in late))  # they are stopped; the others may have been idle for longer
    return late, min(waits)


def stuck_for(states: Sequence[RankState]) -> float:
    """Return for how many seconds no rank has made progress, even if none waits for another; 0 if one has.

    Unknown, so 0, while a rank starts or is in a user's function (job=package.module.function), which shows no
    progress. Stopped ranks don't count.
    """
    working = [each for each in states if each.alive and not each.done and not each.stopped]
    if any(each.pid == 0 or each.phase == RankPhase.FUNCTION for each in working):
        return 0.0
    return min((each.still_s for each in working), default=0.0)


def _behind(states: Sequence[State], *, elsewhere: int) -> list[State]:
    top = _top(states, elsewhere)
    if top > 0:
        return [each for each in states if each.collectives < top]
    meeting = any(each.phase == RankPhase.MEETING for each in states)
    return [each for each in states if meeting and each.phase < RankPhase.MEETING]


def _top(states: Sequence[RankState], elsewhere: int) -> int:
    return max([elsewhere, *(each.collectives for each in states)])


@dataclass
class _Rank:
    info: RankInfo
    status: RankStatus
    since_s: float  # when what is in `seen` last changed
    log_from: int  # bytes that the log had before this rank
    process: psutil.Process | None = None
    oom_kills: Mapping[Path, int] = field(default_factory=dict)  # in its control groups, when it was first seen
    seen: tuple[int, ...] = ()
    was_continued: bool = False  # by us, after it was stopped


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
        self._own = own
        self._clock = clock
        self._limits = limits
        self._ranks: dict[int, _Rank] = {}
        self._late: list[dict[str, Any]] = []  # each time that a rank was late, as in the report
        self._checked_s = self._resumed_s = clock()
        self._late_now: dict[int, tuple[float, dict[str, Any]]] = {}  # rank → since when, and the entry above
        self.stop_signal = 0  # for which all ranks are to stop together; 0 for none

    def add(self, info: RankInfo, status: RankStatus) -> None:
        log = Path(info.log)
        log_from = log.stat().st_size if log.exists() else 0
        self._ranks[info.rank] = _Rank(info, status, since_s=self._clock(), log_from=log_from)

    def check(self, *, elsewhere: Progress | None = None) -> list[dict[str, Any]]:
        """Return what is new, as `late`, `caught_up` and `hung` events.

        Args:
            elsewhere: the progress of the other nodes' ranks.
        """
        states = self.states()
        late, seconds = waited_for(states, elsewhere=elsewhere)
        in_training = all(state.step > 0 for state in states)
        limit_s = self._limits.timeout_s if in_training else self._limits.init_timeout_s
        if len(states) > 1 or elsewhere is not None:
            limit_s += _HUNG_MARGIN_S
        counts = seconds >= min(self._limits.late_after_s, limit_s)  # a hung rank was late before
        events = list(self._note_late(states, {each.rank for each in late}, seconds=seconds if counts else None))
        hung_s = max(seconds, self._stuck_for(states))
        if hung_s > limit_s:
            events.append({"event": "hung", "seconds": hung_s})
        return events

    def _stuck_for(self, states: Sequence[RankState]) -> float:
        """Return `stuck_for`, without the time in which this process didn't run, as when the job was suspended."""
        now = self._clock()
        if now - self._checked_s > _PAUSE_S:
            self._resumed_s = now
        self._checked_s = now
        return min(stuck_for(states), now - self._resumed_s)

    def states(self) -> list[RankState]:
        """Return every rank's present state."""
        return [self._state(rank) for rank in self._ranks.values()]

    def is_stoppable(self) -> bool:
        """Return True if every rank here would stop at the end of a step."""
        return bool(self._ranks) and all(rank.status.read().is_stoppable for rank in self._ranks.values())

    def received_signal(self) -> int:
        """Return the signal by which a rank here was asked to stop, 0 for none."""
        return next((number for rank in self._ranks.values() if (number := rank.status.read().received_signal)), 0)

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
        """Return everything known of this node's ranks as plain types, for `report.make_report`. Takes a second or two.

        Args:
            exits: how processes ended that weren't ended on purpose: status (None: unknown), time, early.
        """
        states = self.states()
        records = {number: rank.status.failure() for number, rank in self._ranks.items()}
        # A rank that recorded a failure isn't asked, as its traceback says more, unless it hangs in closing since.
        # Stopped ranks are continued, so this is done after everything else was read.
        timeout_s = min(self._limits.timeout_s, self._limits.init_timeout_s)
        hanging = {state.rank for state in states if state.still_s > timeout_s / 2}
        asked = [state for state in states if state.alive and (records[state.rank] is None or state.rank in hanging)]
        stacks = self._stacks(asked)
        for state in asked:
            if state.phase in (RankPhase.DATA, RankPhase.EVALUATE) and state.rank in hanging:
                stacks[state.rank] = with_workers(stacks.get(state.rank, ""), self._worker_stacks(state))
        return {
            "node": self.node,
            "time": time.time(),
            "timeout_s": timeout_s,
            "ranks": [
                self._of_rank(each, exits.get(each.rank), record=records[each.rank], stacks=stacks.get(each.rank))
                for each in states
            ],
            "late": self._late,
        }

    def close(self) -> None:
        for rank in self._ranks.values():
            rank.status.close()
        self._ranks.clear()

    def _state(self, rank: _Rank) -> RankState:
        now, status = self._clock(), rank.status.read()
        seen = (status.phase, status.step, status.collectives, status.is_done, status.ticks, status.pid)
        if seen != rank.seen:
            rank.seen, rank.since_s = seen, now
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
            return rank.process.status() if rank.process.is_running() else psutil.STATUS_DEAD
        except psutil.NoSuchProcess:
            return psutil.STATUS_DEAD

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
                self._late_now[state.rank] = now - seconds, entry
                yield {"event": "late", **entry, "pid": state.pid}

    def _of_rank(
        self, state: RankState, end: Mapping[str, Any] | None, *, record: Mapping[str, Any] | None, stacks: str | None
    ) -> dict[str, Any]:
        rank = self._ranks[state.rank]
        log = b"" if end is None else self._log_tail(rank)
        status = 0 if end is None else end["status"]  # None: it is unknown
        if status is None or status < 0:
            _, found, crash = log.rpartition(CRASH.encode())
            stacks = (found + crash).decode(errors="replace") if found else None
        return {
            **asdict(state),
            "place": {
                **asdict(rank.info),
                "node": self.node,
                "host": socket.gethostname(),
                "pid": state.pid or (end or {}).get("pid", 0),  # 0 if it ended before it wrote its pid
                "phase": RankPhase(state.phase).label,
                "step": state.step,
            },
            "failure": failure_facts(
                record,
                end,
                stacks=stacks,
                oom=status in (-signal.SIGKILL, None) and killed_since(rank.oom_kills),
                log=log.decode(errors="replace"),
            ),
            "stacks": stacks,
        }

    def _log_tail(self, rank: _Rank) -> bytes:
        """Return the end of what this rank has written to its log, which several attempts share."""
        log = Path(rank.info.log)
        try:
            with log.open("rb") as file:
                file.seek(max(rank.log_from, log.stat().st_size - _LOG_TAIL_BYTES))
                return file.read()
        except OSError:
            return b""

    def _stacks(self, states: Sequence[RankState]) -> dict[int, str]:
        """Return the Python stacks of these ranks. A stopped one is continued, since it couldn't answer."""
        before: dict[int, int] = {}
        for state in states:
            rank = self._ranks[state.rank]
            if rank.process is None:
                continue
            before[state.rank] = rank.status.stacks_size()
            if self._own is not None and state.pid == os.getpid():
                self._own.write_stacks()
                continue
            with suppress(psutil.NoSuchProcess):  # it has just ended
                _signal_main_thread(rank.process, STACKS_SIGNAL)
                if state.stopped:  # it handles the signal above first, so the stack is that of where it was stopped
                    rank.process.send_signal(signal.SIGCONT)
                    rank.was_continued = True
        deadline = time.monotonic() + _STACKS_TIMEOUT_S
        sizes: dict[int, int] = {}
        while time.monotonic() < deadline:
            time.sleep(_STACKS_POLL_S)
            last, sizes = sizes, {number: self._ranks[number].status.stacks_size() for number in before}
            if sizes == last and all(sizes[number] > before[number] for number in before):
                break
        statuses = {number: self._ranks[number].status for number in before}
        # If a rank can't answer now, what it said earlier.
        return {number: status.stacks(before[number]) or status.stacks() for number, status in statuses.items()}

    def _worker_stacks(self, state: RankState) -> dict[int, str]:
        """Return the stacks of a rank's loader workers, by pid. Being forked, they write them to the rank's page."""
        process = self._ranks[state.rank].process
        status = self._ranks[state.rank].status
        found: dict[int, str] = {}
        with suppress(psutil.NoSuchProcess):
            workers = [] if process is None else process.children()
            for worker in [each for each in workers if _catches(each.pid, STACKS_SIGNAL)][:_MAX_WORKERS_ASKED]:
                before = status.stacks_size()
                _signal_main_thread(worker, STACKS_SIGNAL)
                deadline = time.monotonic() + _WORKER_STACKS_TIMEOUT_S
                size = before
                while time.monotonic() < deadline and (size == before or size != status.stacks_size()):
                    size = status.stacks_size()
                    time.sleep(_STACKS_POLL_S)
                found[worker.pid] = status.stacks(before)
        return found


def _catches(pid: int, number: int) -> bool:
    """Return True if the process has a handler for the signal, which would end it otherwise."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def _signal_main_thread(process: psutil.Process, number: int) -> None:
    """Send a signal to the process's main thread. Of a stopped process, whichever thread runs first would take it.

    Raises psutil.NoSuchProcess if the process has ended.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "tgkill") and process.is_running():  # glibc has it since 2.30
        libc.tgkill(process.pid, process.pid, number)
    else:
        process.send_signal(number)


def count_oom_kills(pid: int, root: Path = Path("/")) -> dict[Path, int]:
    """Return how many kills the memory control groups of a living process have counted, by file.

    Empty if there is no memory controller. The groups above a process's own count the kills of others, too.
    """
    kills: dict[Path, int] = {}
    for levels, version in control_groups("memory", root=root, pid=pid):
        name = "memory.events" if version == 2 else "memory.oom_control"
        own = levels[0] / name
        file = own if own.exists() else levels[-1] / name
        kills[file] = _kills_in(file)
    return kills


def killed_since(before: Mapping[Path, int]) -> bool:
    """Return True if the kernel has killed a process in these groups since `count_oom_kills` returned `before`."""
    return any(_kills_in(file) > kills for file, kills in before.items())


def _kills_in(file: Path) -> int:
    try:
        found = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0
