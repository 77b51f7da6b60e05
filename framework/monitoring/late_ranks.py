"""Which ranks the others wait for, and for how long: pure functions of what a monitor has seen.

A rank that is waited for is late; if that lasts longer than the time-out, it hangs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from framework.monitoring.rank_status import RankPhase


@dataclass(frozen=True)
class RankState:
    """A rank as its node's monitor sees it."""

    rank: int
    pid: int
    alive: bool
    # Stopped by SIGSTOP or a debugger.
    stopped: bool
    # A RankPhase.
    phase: int
    # Optimizer steps done, and collectives begun.
    step: int
    collectives: int
    # Seconds since phase, step, collectives, done or the ticks within a phase last changed.
    still_s: float
    # Seconds since the last heartbeat.
    silent_s: float
    # Its work is done; it only has to leave.
    done: bool = False


State = TypeVar("State", bound=RankState)


@dataclass(frozen=True)
class Progress:
    """Of the ranks that are furthest: how many collectives they have begun, and for how long nothing has changed."""

    collectives: int
    still_s: float


def max_progress(states: Sequence[RankState]) -> Progress:
    """Return the progress of these ranks. An ended rank counts for its collectives, but doesn't wait."""
    most = _most_collectives(states)
    waits = [state.still_s for state in states if state.alive and state.collectives == most]
    return Progress(most, min(waits, default=0.0))


def ranks_behind(states: Sequence[State], *, elsewhere: int = 0) -> list[State]:
    """Return the living ranks that others wait for; none if they can't be distinguished.

    These are:

    - the stopped ranks, unless all of several are, as when a job is suspended;
    - the ranks behind: until the process group is formed, those that haven't come to it; then those that have begun
      fewer collectives. A rank that waits in a collective has begun it, so it is never blamed.

    Args:
        elsewhere: the most collectives begun by ranks that aren't among `states`.
    """
    working = [state for state in states if state.alive and not state.done]
    stopped = [state for state in working if state.stopped]
    if len(stopped) == len(working) > 1:
        stopped = []
    behind = [state for state in _behind(states, elsewhere=elsewhere) if state in working and state not in stopped]
    return stopped + behind


def waited_for(states: Sequence[RankState], *, elsewhere: Progress | None = None) -> tuple[list[RankState], float]:
    """Return the ranks behind, and for how many seconds all others have waited for them; 0 if nobody waits.

    Args:
        elsewhere: the progress of the ranks that aren't among `states`.
    """
    theirs = 0 if elsewhere is None else elsewhere.collectives
    late = ranks_behind(states, elsewhere=theirs)
    most = max(theirs, _most_collectives(states))

    # For how long each of the others has waited. Before the first collective, only those wait that have come to form
    # the process group.
    waits = []
    for state in states:
        is_waiting = state.alive and (most > 0 or state.phase == RankPhase.MEETING)
        if state not in late and (state.done or is_waiting):
            waits.append(state.still_s)
    if elsewhere is not None and theirs == most > 0:
        waits.append(elsewhere.still_s)
    if not late or not waits:
        return late, 0.0

    is_behind = any(state in late for state in _behind(states, elsewhere=theirs))
    if not is_behind:
        # They are only stopped; the others may have been idle for longer than that.
        waits.append(max(state.silent_s for state in late))
    return late, min(waits)


def stuck_for(states: Sequence[RankState]) -> float:
    """Return for how many seconds no rank has made progress, even if none waits for another; 0 if one has.

    Unknown, so 0, while a rank starts or is in a user's function (job=package.module.function), which shows no
    progress. Stopped ranks don't count.
    """
    working = [state for state in states if state.alive and not state.done and not state.stopped]
    if any(state.pid == 0 or state.phase == RankPhase.FUNCTION for state in working):
        return 0.0
    return min((state.still_s for state in working), default=0.0)


def _behind(states: Sequence[State], *, elsewhere: int) -> list[State]:
    most = max(elsewhere, _most_collectives(states))
    if most > 0:
        return [state for state in states if state.collectives < most]
    is_group_forming = any(state.phase == RankPhase.MEETING for state in states)
    if not is_group_forming:
        return []
    return [state for state in states if state.phase < RankPhase.MEETING]


def _most_collectives(states: Sequence[RankState]) -> int:
    return max((state.collectives for state in states), default=0)
