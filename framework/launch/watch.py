"""Watches the ranks of one node through their pulses: who is where, who is late, who has a wish, what their stacks are.

Used by the keeper and, where nothing of ours has started the ranks, by a thread of theirs. It needs no store and no
other node, so it goes on when the network is cut.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from framework.launch.oom import OomWatch
from framework.launch.process import STOPPED, Process, state_of
from framework.launch.report import CRASH, innermost_frames
from framework.launch.standing import Front, Standing, behind, front, lag
from framework.pulse import STACKS_SIGNAL, PulseReader, Stand

_STACKS_TIMEOUT_S = 1.5
_STACKS_POLL_S = 0.02
_LOG_TAIL_BYTES = 32_768
_NCCL_TIMEOUT = b"Watchdog caught collective operation timeout"
_HUNG_MARGIN_S = 5.0  # past the time-out: torch's own is heard first where it works


@dataclass(frozen=True)
class RankFacts:
    """What is known of a rank from the beginning."""

    rank: int
    local_rank: int
    devices: str
    log: str


@dataclass(frozen=True)
class Limits:
    """Seconds: until the first step is done, after it, and when a rank counts as late."""

    init_timeout_s: float
    timeout_s: float
    late_after_s: float


@dataclass
class _Watched:
    facts: RankFacts
    pulse: PulseReader
    since_s: float
    log_from: int  # bytes that the log had before this rank
    process: Process | None = None
    seen: tuple[int, ...] = ()
    stand: Stand | None = None
    was_continued: bool = False  # by us, from being stopped

    def close(self) -> None:
        self.pulse.close()
        if self.process is not None:
            self.process.close()


@dataclass
class Lateness:
    """Others waited for a rank; `seconds` is how long, final once it has caught up."""

    rank: int
    phase: str
    step: int
    since_s: float = field(repr=False)
    seconds: float = 0.0

    def to_plain(self) -> dict[str, Any]:
        return {"rank": self.rank, "phase": self.phase, "step": self.step, "seconds": round(self.seconds, 1)}


@final
class NodeWatch:
    """The watch over one node's ranks, from `add` on. `look` must be called a few times a second."""

    def __init__(self, *, node: int, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self.node = node
        self._clock = clock
        self._limits = limits
        self._ranks: dict[int, _Watched] = {}
        self._late: dict[int, Lateness] = {}
        self.latenesses: list[Lateness] = []
        self._oom = OomWatch()
        self._asked = 0

    def add(self, facts: RankFacts, pulse: PulseReader) -> None:
        log = Path(facts.log)
        log_from = log.stat().st_size if log.exists() else 0
        self._ranks[facts.rank] = _Watched(facts, pulse, since_s=self._clock(), log_from=log_from)

    def look(self, *, elsewhere: Front | None = None) -> list[dict[str, Any]]:
        """What is new: `late`, `caught_up` and `hung` events. elsewhere: the front of the other nodes' ranks."""
        standings = self.standings()
        late, seconds = lag(standings, elsewhere=elsewhere)
        still_late = {each.rank for each in behind(standings, foremost=elsewhere.collectives if elsewhere else 0)}
        limit_s = self._limit(list(self._ranks.values())) + _HUNG_MARGIN_S
        counts = seconds >= min(self._limits.late_after_s, limit_s)  # who hung has been late
        events = [*self._note_late(late if counts else [], seconds), *self._note_caught_up(standings, still_late)]
        if seconds > limit_s:
            events.append({"event": "hung", "seconds": seconds})
        return events

    def standings(self) -> list[Standing]:
        """Every rank as it is now."""
        return [self._standing(watched) for watched in self._ranks.values()]

    def front(self) -> Front:
        return front(self.standings())

    def is_stoppable(self) -> bool:
        """Whether every rank here would heed a wish to stop."""
        return bool(self._ranks) and all(watched.pulse.read().is_stoppable for watched in self._ranks.values())

    def wish(self) -> int:
        """The signal by which one of the ranks was asked to stop; 0 where none was."""
        return next((wish for watched in self._ranks.values() if (wish := watched.pulse.read().wish)), 0)

    def ask_to_stop(self, signal_number: int) -> None:
        """Tell all ranks here that all are asked to stop."""
        self._asked = signal_number
        for watched in self._ranks.values():
            watched.pulse.ask_to_stop(signal_number)

    @property
    def asked_to_stop(self) -> int:
        return self._asked

    def is_done(self, rank: int) -> bool:
        return self._ranks[rank].pulse.read().is_done

    def pid(self, rank: int) -> int:
        return self._ranks[rank].pulse.read().pid

    def staying(self, *, count: int, limit_s: float) -> list[dict[str, Any]]:
        """Ranks that live on, though for `limit_s` all `count` ranks of this node have done their work: rank, pid, the
        status to leave with, and where its threads are. Empty before that. Asks for stacks."""
        standings = self.standings()
        if len(standings) < count or not all(each.done for each in standings):
            return []
        stay = [each for each in standings if each.alive]
        if not stay or min(each.still_s for each in standings) < limit_s:
            return []
        stacks = self._stacks(stay)
        return [
            {
                "rank": each.rank,
                "pid": each.pid,
                "status": self._ranks[each.rank].pulse.read().status,
                "frames": list(innermost_frames(stacks.get(each.rank, ""))),
            }
            for each in stay
        ]

    def failed_by_word(self) -> list[int]:
        """Ranks that left a record of what they raised."""
        return [rank for rank, record in self._records().items() if record is not None]

    def statement(self, exits: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
        """Everything known of this node's ranks, as plain types; see `report.make_report`. Asks the living for stacks.

        exits: how processes ended that weren't ended on purpose: status (None: unknown), time, early.
        """
        standings, records = self.standings(), self._records()  # before those that are stopped are continued
        stacks = self._stacks(standings)
        return {
            "node": self.node,
            "host": socket.gethostname(),
            "ranks": [
                {
                    **self._told(standing, exits.get(standing.rank)),
                    "record": records[standing.rank],
                    "stacks": stacks.get(standing.rank) or self._crash(standing.rank, exits.get(standing.rank)),
                }
                for standing in standings
            ],
            "late": [lateness.to_plain() for lateness in self._current()],
        }

    def close(self) -> None:
        self._oom.close()
        for watched in self._ranks.values():
            watched.close()
        self._ranks.clear()

    def _standing(self, watched: _Watched) -> Standing:
        now, stand = self._clock(), watched.pulse.read()
        seen = (stand.phase, stand.step, stand.collectives, stand.is_done)
        if seen != watched.seen:
            watched.seen, watched.since_s = seen, now
        watched.stand = stand
        alive = self._is_alive(watched, stand)
        return Standing(
            rank=watched.facts.rank,
            pid=stand.pid,
            alive=alive,
            stopped=alive and (watched.was_continued or state_of(stand.pid) in STOPPED),
            phase=stand.phase,
            step=stand.step,
            collectives=stand.collectives,
            still_s=now - watched.since_s,
            silent_s=now - stand.beat_s if stand.pid else 0.0,
            done=stand.is_done,
        )

    def _is_alive(self, watched: _Watched, stand: Stand) -> bool:
        """A process that has yet to begin counts as living; one that has ended does not, reaped or not."""
        if not stand.pid:
            return True
        if watched.process is None:
            watched.process = Process(stand.pid)
            self._oom.follow(stand.pid)
        return watched.process.is_alive()

    def _note_late(self, late: list[Standing], seconds: float) -> Iterator[dict[str, Any]]:
        for standing in late:
            if standing.rank not in self._late:
                since_s = self._clock() - seconds
                lateness = Lateness(
                    standing.rank, standing.phase.label, standing.step, since_s=since_s, seconds=seconds
                )
                self._late[standing.rank] = lateness
                self.latenesses.append(lateness)
                yield {"event": "late", **lateness.to_plain(), "pid": standing.pid}

    def _note_caught_up(self, standings: list[Standing], still_late: set[int]) -> Iterator[dict[str, Any]]:
        for standing in standings:
            if standing.rank in self._late and standing.rank not in still_late:
                lateness = self._late.pop(standing.rank)
                lateness.seconds = self._clock() - lateness.since_s
                if standing.alive or standing.done:
                    yield {"event": "caught_up", **lateness.to_plain()}

    def _records(self) -> dict[int, dict[str, Any] | None]:
        return {rank: watched.pulse.failure() for rank, watched in self._ranks.items()}

    def _current(self) -> list[Lateness]:
        for lateness in self._late.values():
            lateness.seconds = self._clock() - lateness.since_s
        return self.latenesses

    def _limit(self, some: Sequence[_Watched]) -> float:
        """The time-out in force: that of set-up until every rank of these has done a step."""
        began = all(watched.stand is not None and watched.stand.step > 0 for watched in some)
        return self._limits.timeout_s if began else self._limits.init_timeout_s

    def _told(self, standing: Standing, end: Mapping[str, Any] | None) -> dict[str, Any]:
        facts = self._ranks[standing.rank].facts
        killed = end is not None and end["status"] in (-signal.SIGKILL, None)  # None: nobody could see how it ended
        return {
            "standing": standing.to_plain(),
            "local_rank": facts.local_rank,
            "devices": facts.devices,
            "log": facts.log,
            "limit_s": self._limit([self._ranks[standing.rank]]),
            "exit": None if end is None else dict(end),
            "oom": killed and self._oom.killed(standing.pid),
            "nccl_timeout": end is not None and _NCCL_TIMEOUT in self._log_tail(standing.rank),
        }

    def _crash(self, rank: int, end: Mapping[str, Any] | None) -> str | None:
        """The stacks that faulthandler has left in the log of a process that a signal ended, or that ended unseen."""
        if end is None or (end["status"] is not None and end["status"] >= 0):
            return None
        _, found, stacks = self._log_tail(rank).rpartition(CRASH.encode())
        return (found + stacks).decode(errors="replace") if found else None

    def _log_tail(self, rank: int) -> bytes:
        """The end of what this rank has written to its log; attempts share one."""
        watched = self._ranks[rank]
        log = Path(watched.facts.log)
        try:
            with log.open("rb") as file:
                file.seek(max(watched.log_from, log.stat().st_size - _LOG_TAIL_BYTES))
                return file.read()
        except OSError:
            return b""

    def _stacks(self, standings: list[Standing]) -> dict[int, str]:
        """The Python stacks of the living ranks; those that are stopped are continued first, as they must to answer."""
        before: dict[int, int] = {}
        for standing in standings:
            watched = self._ranks[standing.rank]
            if not standing.alive or watched.process is None:
                continue
            before[standing.rank] = watched.pulse.stacks_size()
            with suppress(ProcessLookupError):  # it ended just now
                watched.process.send(STACKS_SIGNAL)
                if standing.stopped:  # what was sent before comes first, so the stack is that of where it was stopped
                    watched.process.send(signal.SIGCONT)
                    watched.was_continued = True
        deadline = time.monotonic() + _STACKS_TIMEOUT_S
        sizes: dict[int, int] = {}
        while time.monotonic() < deadline:
            time.sleep(_STACKS_POLL_S)
            now = {rank: self._ranks[rank].pulse.stacks_size() for rank in before}
            if now == sizes and all(now[rank] > before[rank] for rank in before):
                break
            sizes = now
        told = {rank: self._ranks[rank].pulse for rank in before}
        # One that can't answer now may have done so when it was asked before.
        return {rank: text for rank, pulse in told.items() if (text := pulse.stacks(before[rank]) or pulse.stacks())}
