"""How far each rank is, and which ones the others wait for. Pure: what `watch` saw goes in, a verdict comes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from framework.pulse import Phase

SILENT_S = 8.0
"""Without a heartbeat for so long a process counts as frozen; beats come twice a second."""


@dataclass(frozen=True)
class Standing:
    """A rank as its node's watcher sees it.

    alive: the process has not ended. stopped: by SIGSTOP or a debugger. still_s: how long all of phase, step,
    collectives and done have been as they are. silent_s: since the last heartbeat. done: its work is, it only leaves.
    """

    rank: int
    pid: int
    alive: bool
    stopped: bool
    phase: Phase
    step: int
    collectives: int
    still_s: float
    silent_s: float
    done: bool = False

    @property
    def is_silent(self) -> bool:
        """Whether the process doesn't run Python, though it has begun to."""
        return self.pid > 0 and self.silent_s > SILENT_S

    def to_plain(self) -> dict[str, Any]:
        return {**asdict(self), "phase": self.phase.label}

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> Standing:
        return Standing(**{**plain, "phase": Phase[plain["phase"].upper()]})


@dataclass(frozen=True)
class Front:
    """How far the foremost ranks are: collectives begun, and for how long nothing has changed for any of them."""

    collectives: int
    still_s: float


def front(standings: Sequence[Standing]) -> Front:
    """The foremost of these ranks; those that have ended count for how far they came, not for how long they wait."""
    foremost = max((each.collectives for each in standings), default=0)
    waiting = [each.still_s for each in standings if each.alive and each.collectives == foremost]
    return Front(foremost, min(waiting, default=0.0))


def behind(standings: Sequence[Standing], *, foremost: int = 0) -> list[Standing]:
    """The living ranks that others wait for; empty where nobody is told apart.

    Those that are stopped, and those that are less far: while ranks meet to form the process group, who has yet to
    come; then who has begun fewer collectives, for whoever waits in one has begun it, so waiting is never blamed.
    Where all are equally far, those whose Python doesn't run.
    `foremost`: collectives begun by ranks that aren't among `standings`.
    """
    working = _at_work(standings)
    stopped = _told_apart([each for each in working if each.stopped], of=working)
    less_far = _less_far(standings, foremost=foremost)
    told = {each.rank for each in stopped}
    late = stopped + [each for each in less_far if each.rank not in told]
    return late or _told_apart([each for each in working if each.is_silent], of=working)


def lag(standings: Sequence[Standing], *, elsewhere: Front | None = None) -> tuple[list[Standing], float]:
    """Who is behind, and for how many seconds the others have been waiting for them; 0 where nobody waits.

    elsewhere: the front of the ranks that aren't among `standings`.
    """
    foremost = 0 if elsewhere is None else elsewhere.collectives
    late = behind(standings, foremost=foremost)
    top, late_ranks = _top(standings, foremost=foremost), {each.rank for each in late}
    waits = [
        each.still_s
        for each in standings
        if each.rank not in late_ranks and (each.done or (each.alive and (top > 0 or each.phase is Phase.MEETING)))
    ]
    if elsewhere is not None and elsewhere.collectives == top > 0:
        waits.append(elsewhere.still_s)
    if not late or not waits:
        return [], 0.0
    if not _less_far(standings, foremost=foremost):  # the others may be still for reasons of their own, and for longer
        waits.append(max(each.silent_s for each in late))
    return late, min(waits)


def _at_work(standings: Sequence[Standing]) -> list[Standing]:
    """Who may be waited for: a process that has ended never comes, one that is done need not."""
    return [each for each in standings if each.alive and not each.done]


def _told_apart(some: list[Standing], *, of: list[Standing]) -> list[Standing]:
    """What happens to all of several, as when a job is suspended, says nothing about one."""
    return some if len(some) < max(len(of), 2) else []


def _less_far(standings: Sequence[Standing], *, foremost: int) -> list[Standing]:
    top = _top(standings, foremost=foremost)
    if top > 0:
        return [each for each in _at_work(standings) if each.collectives < top]
    meeting = any(each.phase is Phase.MEETING for each in standings)
    return [each for each in _at_work(standings) if each.phase < Phase.MEETING] if meeting else []


def _top(standings: Sequence[Standing], *, foremost: int) -> int:
    return max([foremost, *(each.collectives for each in standings)])
