"""Which ranks the others wait for, and when one is late or hung, with a clock of our own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.internals import (
    Limits,
    NodeMonitor,
    Progress,
    RankInfo,
    RankPhase,
    RankState,
    RankStatus,
    max_progress,
    ranks_behind,
    waited_for,
)
from tests.unit.launch.statements import state

# Who is waited for


def starting(rank: int, **changes: Any) -> RankState:
    return state(rank, **{"phase": RankPhase.STARTING, "step": 0, "collectives": 0, **changes})


def meeting(rank: int, **changes: Any) -> RankState:
    return starting(rank, **{"phase": RankPhase.MEETING, **changes})


def less(rank: int, **changes: Any) -> RankState:
    """One that has begun a collective less than the others."""
    return state(rank, **{"collectives": 19, **changes})


def done(rank: int, **changes: Any) -> RankState:
    return state(rank, **{"done": True, **changes})


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """The ranks of a node, how far other nodes are, and who is waited for."""

    ranks: list[RankState]
    elsewhere: Progress | None = None
    late: list[int] = field(default_factory=list)
    seconds: float = 0.0


@pytest.mark.parametrize(
    "case",
    [
        Waiting(ranks=[state(rank, still_s=50.0) for rank in range(4)]),
        # since the last of the others came
        Waiting(ranks=[state(0, still_s=9.0), less(1, still_s=30.0), state(2, still_s=4.0)], late=[1], seconds=4.0),
        Waiting(
            ranks=[meeting(0, still_s=6.0), starting(1, pid=0, silent_s=0.0), meeting(2, still_s=5.0)],
            late=[1],
            seconds=5.0,
        ),
        Waiting(ranks=[starting(0, still_s=60.0), starting(1, pid=0, still_s=60.0)]),
        *(Waiting(ranks=[meeting(0), starting(1, phase=phase)]) for phase in (RankPhase.BUILDING, RankPhase.DATA)),
        # stopped: since then, for the others may be still for reasons of their own
        Waiting(
            ranks=[state(0, still_s=9.0), state(1, stopped=True, silent_s=3.0, still_s=9.0)], late=[1], seconds=3.0
        ),
        Waiting(ranks=[state(0, still_s=2.0), less(1), state(2, stopped=True)], late=[2, 1], seconds=2.0),
        # a job that is suspended as a whole
        Waiting(ranks=[state(rank, stopped=True, silent_s=99.0) for rank in range(3)]),
        Waiting(ranks=[state(0, still_s=1.0), state(1, silent_s=99.0), less(2)], late=[2], seconds=0.1),
        # ended or done: it isn't waited for, but may wait
        Waiting(ranks=[state(0), less(1, alive=False), less(2, done=True)]),
        Waiting(ranks=[done(0, still_s=40.0), done(1, alive=False, still_s=41.0), state(2, phase=RankPhase.CLOSING)]),
        Waiting(ranks=[done(0, still_s=40.0), state(1, stopped=True, silent_s=60.0)], late=[1], seconds=40.0),
        Waiting(ranks=[state(0, alive=False, still_s=9.0), less(1)], late=[1]),
        # other nodes wait too
        Waiting(ranks=[less(0), less(1)], elsewhere=Progress(20, 7.0), late=[0, 1], seconds=7.0),
        Waiting(ranks=[less(0), less(1)], elsewhere=Progress(18, 7.0)),
        Waiting(ranks=[starting(0, stopped=True)], elsewhere=Progress(0, 7.0), late=[0]),
    ],
)
def test_who_is_waited_for_and_how_long(case: Waiting) -> None:
    found, waited_s = waited_for(case.ranks, elsewhere=case.elsewhere)
    assert ([each.rank for each in found], waited_s) == (case.late, case.seconds)


def test_how_far_the_foremost_ranks_are() -> None:
    ranks = [state(0, still_s=9.0), state(1, still_s=2.0, alive=False), less(2), state(3, still_s=5.0)]
    assert (max_progress(ranks), max_progress([])) == (Progress(20, 5.0), Progress(0, 0.0))


@st.composite
def groups(draw: st.DrawFn) -> list[RankState]:
    flag = st.booleans()
    seconds = st.floats(0, 100)
    return [
        state(
            rank,
            pid=draw(st.sampled_from([0, 1000 + rank])),
            alive=draw(flag),
            stopped=draw(flag),
            phase=draw(st.sampled_from(RankPhase)),
            collectives=draw(st.integers(0, 5)),
            still_s=draw(seconds),
            silent_s=draw(seconds),
            done=draw(flag),
        )
        for rank in range(draw(st.integers(1, 6)))
    ]


@given(groups(), st.randoms())
def test_a_waiting_rank_is_never_blamed(ranks: list[RankState], random: Any) -> None:
    late, waited_s = waited_for(ranks)
    assert all(each.alive and not each.done for each in late)
    assert waited_s == 0.0 or len(late) < len(ranks)
    assert waited_s <= max(each.still_s for each in ranks)
    top = max(each.collectives for each in ranks)
    found = ranks_behind(ranks)
    if any(each.collectives < top for each in found):
        assert all(each.collectives < top or each.stopped for each in found)
    shuffled = random.sample(ranks, len(ranks))
    assert set(ranks_behind(shuffled)) == set(found)
    assert waited_for(shuffled)[1] == waited_s


@given(st.integers(2, 6), st.data(), st.integers(1, 30), st.floats(0, 100))
def test_a_rank_that_hangs_is_found(size: int, data: st.DataObject, collectives: int, waited_s: float) -> None:
    hung = data.draw(st.integers(0, size - 1))
    phase = data.draw(st.sampled_from([phase for phase in RankPhase if phase > RankPhase.MEETING]))
    ranks = [state(rank, collectives=collectives, still_s=waited_s + rank) for rank in range(size)]
    ranks[hung] = replace(ranks[hung], collectives=collectives - 1, phase=phase)
    late, found_s = waited_for(ranks)
    assert [each.rank for each in late] == [hung]
    assert found_s == min(each.still_s for each in ranks if each.rank != hung)


# When it is late, and when it is hung


class Watched:
    """The monitor of a node with ranks that are no processes, and a clock that only tests move."""

    def __init__(self, stack: ExitStack, *, count: int, folder: Path, **limits: float) -> None:
        self.now = 1000.0
        given = {"init_timeout_s": 60.0, "timeout_s": 20.0, "late_after_s": 10.0, **limits}
        self.monitor = NodeMonitor(node=0, limits=Limits(**given), clock=lambda: self.now)
        stack.callback(self.monitor.close)
        self.ranks = [RankStatus() for _ in range(count)]
        for rank, rank_status in enumerate(self.ranks):
            stack.callback(rank_status.close)
            info = RankInfo(rank, rank, "CPU", log=str(folder / f"rank_{rank}.log"))
            self.monitor.add(info, RankStatus(os.dup(rank_status.fd)))
        self.monitor.check()

    def after(self, seconds: float, **how: Any) -> list[str]:
        self.now += seconds
        return [event["event"] for event in self.monitor.check(**how)]


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    with ExitStack() as stack:
        yield lambda count=2, **limits: Watched(stack, count=count, folder=tmp_path, **limits)


def test_late_ranks_are_announced_and_catch_up(watched: Callable[..., Watched]) -> None:
    at = watched()
    slow, fast = at.ranks
    slow.set_phase(RankPhase.DATA)
    for rank in at.ranks:
        rank.finish_step(4)
    slow.beat(9)
    fast.beat(10)
    assert at.after(0.0) == []
    assert at.after(9.9) == []
    at.now += 0.1
    (late,) = at.monitor.check()
    assert {key: late[key] for key in ("event", "rank", "phase", "step")} == {
        "event": "late",
        "rank": 0,
        "phase": "data",
        "step": 4,
    }
    assert late["seconds"] == pytest.approx(10.0)
    assert at.after(5.0) == []
    slow.beat(10)
    at.now += 1.0
    (caught_up,) = at.monitor.check()
    assert (caught_up["event"], caught_up["rank"], caught_up["seconds"]) == ("caught_up", 0, 16.0)
    assert at.monitor.statement({})["late"] == [{"rank": 0, "phase": "data", "step": 4, "seconds": 16.0}]


@pytest.mark.parametrize(("steps", "limit_s"), [((0, 0), 60.0), ((1, 1), 20.0), ((0, 1), 60.0)])
def test_a_rank_hangs_past_the_current_timeout(
    watched: Callable[..., Watched], steps: Sequence[int], limit_s: float
) -> None:
    """Until every rank has done its first step, the time-out of set-up holds. The monitor waits 5 s more than torch."""
    at = watched(late_after_s=100.0)
    for rank, step in zip(at.ranks, steps, strict=True):
        rank.finish_step(step)
    at.ranks[1].beat(1)
    assert at.after(0.0) == []
    assert at.after(limit_s + 4.9) == []
    # The rank is announced as late first, so that the report can tell which one it was.
    assert at.after(0.2) == ["late", "hung"]


def test_a_node_that_lags_entirely_is_late(watched: Callable[..., Watched]) -> None:
    at = watched()
    for rank in at.ranks:
        rank.beat(9)
    assert at.after(1.0, elsewhere=Progress(10, 9.0)) == []
    assert at.after(1.0, elsewhere=Progress(10, 10.0)) == ["late", "late"]


CRASH = "Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n"
NCCL = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)\n"


@pytest.mark.parametrize(("status", "crashed"), [(-11, True), (1, False), (None, True)])
def test_the_cause_is_read_from_a_ranks_log(
    watched: Callable[..., Watched], tmp_path: Path, status: int | None, crashed: bool
) -> None:
    log = tmp_path / "rank_0.log"
    # The log holds an earlier attempt's crash.
    log.write_text(NCCL + CRASH)
    at = watched(1)
    end = {0: {"status": status, "time": 1.0, "early": False}}
    (said,) = at.monitor.statement(end)["ranks"]
    assert (said["stacks"], said["failure"]["timed_out"]) == (None, False)
    log.write_text(log.read_text() + "more\n" + NCCL + CRASH)
    (said,) = at.monitor.statement(end)["ranks"]
    assert (said["stacks"], said["failure"]["timed_out"]) == (CRASH if crashed else None, True)
