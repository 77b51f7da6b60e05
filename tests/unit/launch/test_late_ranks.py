"""Which ranks the others wait for, and when one is late or hung, with a clock of our own."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.launch.standing import SILENT_S, Front, Standing, behind, front, lag
from framework.launch.watch import Limits, NodeWatch, RankFacts
from framework.pulse import Phase, Pulse, PulseReader
from tests.unit.launch.statements import standing

# Who is waited for


def starting(rank: int, **changes: Any) -> Standing:
    return standing(rank, **{"phase": Phase.STARTING, "step": 0, "collectives": 0, **changes})


def meeting(rank: int, **changes: Any) -> Standing:
    return starting(rank, **{"phase": Phase.MEETING, **changes})


def less(rank: int, **changes: Any) -> Standing:
    """One that has begun a collective less than the others."""
    return standing(rank, **{"collectives": 19, **changes})


def done(rank: int, **changes: Any) -> Standing:
    return standing(rank, **{"done": True, **changes})


@pytest.mark.parametrize(
    ("ranks", "elsewhere", "late", "seconds"),
    [
        ([standing(rank, still_s=50.0) for rank in range(4)], None, [], 0.0),
        # since the last of the others came
        ([standing(0, still_s=9.0), less(1, still_s=30.0), standing(2, still_s=4.0)], None, [1], 4.0),
        ([meeting(0, still_s=6.0), starting(1, pid=0, silent_s=0.0), meeting(2, still_s=5.0)], None, [1], 5.0),
        ([starting(0, still_s=60.0), starting(1, pid=0, still_s=60.0)], None, [], 0.0),
        *(([meeting(0), starting(1, phase=phase)], None, [], 0.0) for phase in (Phase.BUILDING, Phase.DATA)),
        # stopped: since then, for the others may be still for reasons of their own
        ([standing(0, still_s=9.0), standing(1, stopped=True, silent_s=3.0, still_s=9.0)], None, [1], 3.0),
        ([standing(0, still_s=2.0), less(1), standing(2, stopped=True)], None, [2, 1], 2.0),
        # a job that is suspended as a whole
        ([standing(rank, stopped=True, silent_s=99.0) for rank in range(3)], None, [], 0.0),
        # silent, where all are equally far
        ([standing(0, still_s=20.0), standing(1, silent_s=SILENT_S + 1)], None, [1], SILENT_S + 1),
        ([standing(0), standing(1, silent_s=SILENT_S - 1)], None, [], 0.0),
        ([standing(0), standing(1, pid=0, silent_s=99.0)], None, [], 0.0),
        ([standing(0, still_s=1.0), standing(1, silent_s=99.0), less(2)], None, [2], 0.1),
        # ended or done: it isn't waited for, but may wait
        ([standing(0), less(1, alive=False), less(2, done=True)], None, [], 0.0),
        ([done(0, still_s=40.0), done(1, alive=False, still_s=41.0), standing(2, phase=Phase.CLOSING)], None, [], 0.0),
        ([done(0, still_s=40.0), standing(1, stopped=True, silent_s=60.0)], None, [1], 40.0),
        ([standing(0, alive=False, still_s=9.0), less(1)], None, [], 0.0),
        # other nodes wait too
        ([less(0), less(1)], Front(20, 7.0), [0, 1], 7.0),
        ([less(0), less(1)], Front(18, 7.0), [], 0.0),
        ([starting(0, stopped=True)], Front(0, 7.0), [], 0.0),
    ],
)
def test_who_is_waited_for_and_how_long(
    ranks: list[Standing], elsewhere: Front | None, late: list[int], seconds: float
) -> None:
    found, waited_s = lag(ranks, elsewhere=elsewhere)
    assert ([each.rank for each in found], waited_s) == (late, seconds)


def test_how_far_the_foremost_ranks_are() -> None:
    ranks = [
        standing(0, still_s=9.0),
        standing(1, still_s=2.0, alive=False),
        less(2, still_s=1.0),
        standing(3, still_s=5.0),
    ]
    assert (front(ranks), front([])) == (Front(20, 5.0), Front(0, 0.0))
    assert [Standing.from_plain(json.loads(json.dumps(each.to_plain()))) for each in ranks] == ranks


@st.composite
def groups(draw: st.DrawFn) -> list[Standing]:
    """Any ranks of a run, in any order."""
    flag, seconds = st.booleans(), st.floats(0, 100)
    ranks = [
        standing(
            rank,
            pid=draw(st.sampled_from([0, 1000 + rank])),
            alive=draw(flag),
            stopped=draw(flag),
            phase=draw(st.sampled_from(Phase)),
            collectives=draw(st.integers(0, 5)),
            still_s=draw(seconds),
            silent_s=draw(seconds),
            done=draw(flag),
        )
        for rank in range(draw(st.integers(1, 6)))
    ]
    return list(draw(st.permutations(ranks)))


@given(groups(), st.randoms())
def test_a_rank_that_waits_is_never_blamed_whatever_the_order(ranks: list[Standing], random: Any) -> None:
    late, waited_s = lag(ranks)
    assert all(each.alive and not each.done for each in late)
    assert waited_s == 0.0 or len(late) < len(ranks)
    assert waited_s <= max(each.still_s for each in ranks)
    top, found = max(each.collectives for each in ranks), behind(ranks)
    if any(each.collectives < top for each in found):
        assert all(each.collectives < top or each.stopped for each in found)
    shuffled = list(ranks)
    random.shuffle(shuffled)
    assert set(behind(shuffled)) == set(found)
    assert lag(shuffled)[1] == waited_s


@given(st.integers(2, 6), st.data(), st.integers(1, 30), st.floats(0, 100))
def test_a_rank_that_hangs_is_found(size: int, data: st.DataObject, collectives: int, waited_s: float) -> None:
    hung = data.draw(st.integers(0, size - 1))
    phase = data.draw(st.sampled_from([phase for phase in Phase if phase > Phase.MEETING]))
    ranks = [standing(rank, collectives=collectives, still_s=waited_s + rank) for rank in range(size)]
    ranks[hung] = replace(ranks[hung], collectives=collectives - 1, phase=phase)
    late, found_s = lag(ranks)
    assert [each.rank for each in late] == [hung]
    assert found_s == min(each.still_s for each in ranks if each.rank != hung)


# When it is late, and when it is hung


class Watched:
    """The watch of a node with ranks that are no processes, and a clock that stands until it is set."""

    def __init__(self, stack: ExitStack, *, count: int, folder: Path, **limits: float) -> None:
        self.now = 1000.0
        given = {"init_timeout_s": 60.0, "timeout_s": 20.0, "late_after_s": 10.0, **limits}
        self.watch = NodeWatch(node=0, limits=Limits(**given), clock=lambda: self.now)
        stack.callback(self.watch.close)
        self.ranks = [Pulse() for _ in range(count)]
        for rank, pulse in enumerate(self.ranks):
            stack.callback(pulse.close)
            facts = RankFacts(rank, rank, "CPU", log=str(folder / f"rank_{rank}.log"))
            self.watch.add(facts, PulseReader(os.dup(pulse.fd)))
        self.watch.look()

    def after(self, seconds: float, **how: Any) -> list[str]:
        self.now += seconds
        return [event["event"] for event in self.watch.look(**how)]


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    with ExitStack() as stack:
        yield lambda count=2, **limits: Watched(stack, count=count, folder=tmp_path, **limits)


def test_a_late_rank_is_announced_once_and_again_when_it_has_caught_up(watched: Callable[..., Watched]) -> None:
    at = watched()
    slow, fast = at.ranks
    slow.at(Phase.DATA)
    for rank in at.ranks:
        rank.stepped(4)
    slow.beat(9)
    fast.beat(10)
    assert at.after(0.0) == []
    assert at.after(9.9) == []
    at.now += 0.1
    (late,) = at.watch.look()
    assert {key: late[key] for key in ("event", "rank", "phase", "step")} == {
        **{"event": "late", "rank": 0, "phase": "data", "step": 4}
    }
    assert late["seconds"] == pytest.approx(10.0)
    assert at.after(5.0) == []
    slow.beat(10)
    at.now += 1.0
    (caught_up,) = at.watch.look()
    assert (caught_up["event"], caught_up["rank"], caught_up["seconds"]) == ("caught_up", 0, 16.0)
    assert at.watch.statement({})["late"] == [{"rank": 0, "phase": "data", "step": 4, "seconds": 16.0}]


@pytest.mark.parametrize(("step", "limit_s"), [(0, 60.0), (1, 20.0)])
def test_a_rank_hangs_past_the_time_out_in_force(watched: Callable[..., Watched], step: int, limit_s: float) -> None:
    """Before every rank has done its first step that of set-up; and 5 s later, so that torch's own is heard first."""
    at = watched(late_after_s=100.0)
    for rank in at.ranks:
        rank.stepped(step)
    at.ranks[1].beat(1)
    assert at.after(0.0) == []
    assert at.after(limit_s + 4.9) == []
    assert at.after(0.2) == ["late", "hung"]  # late, so that the report can tell which one it was
    assert [each["limit_s"] for each in at.watch.statement({})["ranks"]] == [limit_s] * 2


def test_the_time_out_of_each_rank_is_the_one_it_waits_with(watched: Callable[..., Watched]) -> None:
    at = watched()
    at.ranks[0].stepped(1)
    at.watch.look()
    assert [each["limit_s"] for each in at.watch.statement({})["ranks"]] == [20.0, 60.0]


def test_a_node_whose_ranks_all_lag_behind_another_is_late(watched: Callable[..., Watched]) -> None:
    at = watched()
    for rank in at.ranks:
        rank.beat(9)
    assert at.after(1.0, elsewhere=Front(10, 9.0)) == []
    assert at.after(1.0, elsewhere=Front(10, 10.0)) == ["late", "late"]


def test_ranks_that_stay_after_all_are_done_are_named_after_the_limit(watched: Callable[..., Watched]) -> None:
    at = watched()
    at.ranks[0].be_done(75)
    assert at.after(99.0) == []
    assert at.watch.staying(count=2, limit_s=10.0) == []
    at.ranks[1].be_done()
    at.watch.look()
    at.now += 9.9
    assert at.watch.staying(count=2, limit_s=10.0) == []
    at.now += 0.2
    assert [(each["rank"], each["status"]) for each in at.watch.staying(count=2, limit_s=10.0)] == [(0, 75), (1, 0)]
    assert at.watch.staying(count=3, limit_s=10.0) == []  # one has yet to be started


def test_requests_to_stop_and_failures_are_seen_and_passed_on(watched: Callable[..., Watched]) -> None:
    at = watched()
    one, other = at.ranks
    one.be_stoppable(True)
    assert not at.watch.is_stoppable()
    other.be_stoppable(True)
    assert at.watch.is_stoppable()
    assert at.watch.wish() == 0
    other.wish_to_stop(signal.SIGTERM)
    assert (at.watch.wish(), at.watch.asked_to_stop) == (signal.SIGTERM, 0)
    at.watch.ask_to_stop(signal.SIGTERM)
    assert (one.asked_to_stop, other.asked_to_stop, at.watch.asked_to_stop) == (signal.SIGTERM,) * 3
    assert at.watch.failed_by_word() == []
    other.fail({"exception": "no"})
    one.be_done()
    assert at.watch.failed_by_word() == [1]
    assert (at.watch.is_done(0), at.watch.is_done(1)) == (True, False)


CRASH = (
    'Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n  File "a", line 1 in f\n'
)
NCCL = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)\n"


@pytest.mark.parametrize(("status", "crashed"), [(-11, True), (-6, True), (1, False), (None, True)])
def test_the_log_of_a_rank_tells_why_it_ended(
    watched: Callable[..., Watched], tmp_path: Path, status: int | None, crashed: bool
) -> None:
    log = tmp_path / "rank_0.log"
    log.write_text(NCCL + CRASH)  # of the attempt before
    at = watched(1)
    end = {0: {"status": status, "time": 1.0, "early": False}}
    (said,) = at.watch.statement(end)["ranks"]
    assert (said["stacks"], said["nccl_timeout"]) == (None, False)
    log.write_text(log.read_text() + "more\n" + NCCL + CRASH)
    (said,) = at.watch.statement(end)["ranks"]
    assert (said["stacks"], said["nccl_timeout"]) == (CRASH if crashed else None, True)
    assert not at.watch.statement({})["ranks"][0]["nccl_timeout"]
