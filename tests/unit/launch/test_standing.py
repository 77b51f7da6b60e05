from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.launch.standing import SILENT_S, Front, Standing, behind, front, lag
from framework.pulse import Phase
from tests.unit.launch.statements import standing


def starting(rank: int, **changes: object) -> Standing:
    return standing(rank, **{"phase": Phase.STARTING, "step": 0, "collectives": 0, **changes})


def meeting(rank: int, **changes: object) -> Standing:
    return starting(rank, **{"phase": Phase.MEETING, **changes})


def ranks_of(standings: list[Standing]) -> list[int]:
    return [each.rank for each in standings]


def test_all_at_the_same_place_wait_for_nobody() -> None:
    standings = [standing(rank, still_s=50.0) for rank in range(4)]
    assert behind(standings) == []
    assert lag(standings) == ([], 0.0)


def test_who_has_begun_fewer_collectives_is_waited_for_since_the_last_of_the_others_came() -> None:
    standings = [standing(0, still_s=9.0), standing(1, collectives=19, still_s=30.0), standing(2, still_s=4.0)]
    late, seconds = lag(standings)
    assert (ranks_of(late), seconds) == ([1], 4.0)


def test_a_rank_that_does_not_begin_to_meet_is_waited_for() -> None:
    standings = [meeting(0, still_s=6.0), starting(1, pid=0, still_s=7.0, silent_s=0.0), meeting(2, still_s=5.0)]
    late, seconds = lag(standings)
    assert (ranks_of(late), seconds) == ([1], 5.0)


def test_before_anybody_meets_nobody_is_late() -> None:
    assert lag([starting(0, still_s=60.0), starting(1, pid=0, still_s=60.0)]) == ([], 0.0)


@pytest.mark.parametrize("phase", [Phase.BUILDING, Phase.DATA, Phase.EVALUATE])
def test_between_meeting_and_the_first_collective_nobody_is_late(phase: Phase) -> None:
    assert behind([meeting(0), starting(1, phase=phase)]) == []


def test_a_stopped_rank_is_waited_for_wherever_it_is() -> None:
    standings = [standing(0, still_s=9.0), standing(1, stopped=True, silent_s=3.0, still_s=9.0)]
    late, seconds = lag(standings)
    assert (ranks_of(late), seconds) == ([1], 3.0)  # not since the others are still: that may have reasons of its own


def test_stopped_and_less_far_are_both_waited_for() -> None:
    standings = [standing(0), standing(1, collectives=19), standing(2, stopped=True)]
    assert ranks_of(behind(standings)) == [2, 1]


def test_a_job_that_is_suspended_as_a_whole_tells_nobody_apart() -> None:
    assert behind([standing(rank, stopped=True, silent_s=99.0) for rank in range(3)]) == []
    all_stopped = [standing(0, stopped=True), standing(1, stopped=True, collectives=19)]
    assert ranks_of(behind(all_stopped)) == [1]


def test_silence_counts_where_all_are_equally_far() -> None:
    silent = standing(1, silent_s=SILENT_S + 1)
    assert ranks_of(behind([standing(0), silent, standing(2)])) == [1]
    assert ranks_of(behind([standing(0), silent, standing(2, collectives=19)])) == [2]
    assert behind([standing(0), standing(1, silent_s=SILENT_S - 1)]) == []


def test_a_process_that_has_yet_to_begin_is_not_silent() -> None:
    assert not standing(0, pid=0, silent_s=99.0).is_silent


def test_who_has_ended_or_is_done_is_not_waited_for() -> None:
    standings = [standing(0), standing(1, collectives=3, alive=False), standing(2, collectives=3, done=True)]
    assert behind(standings) == []


def test_those_that_are_done_wait_for_one_that_does_not_run() -> None:
    done = [standing(rank, done=True, alive=rank == 0, still_s=40.0 + rank) for rank in range(2)]
    assert lag([*done, standing(2, phase=Phase.CLOSING)]) == ([], 0.0)  # it may have something to write
    late, seconds = lag([*done, standing(2, phase=Phase.CLOSING, stopped=True, silent_s=60.0)])
    assert (ranks_of(late), seconds) == ([2], 40.0)


def test_where_the_others_are_dead_nobody_waits() -> None:
    standings = [standing(0, alive=False, still_s=9.0), standing(1, collectives=19)]
    assert ranks_of(behind(standings)) == [1]
    assert lag(standings) == ([], 0.0)


def test_ranks_of_other_nodes_wait_too() -> None:
    own = [standing(0, collectives=19), standing(1, collectives=19)]
    late, seconds = lag(own, elsewhere=Front(20, 7.0))
    assert (ranks_of(late), seconds) == ([0, 1], 7.0)
    assert lag(own, elsewhere=Front(18, 7.0)) == ([], 0.0)
    assert lag([starting(0, stopped=True)], elsewhere=Front(0, 7.0)) == ([], 0.0)


def test_the_front() -> None:
    standings = [
        standing(0, still_s=9.0),
        standing(1, still_s=2.0, alive=False),
        standing(2, collectives=19, still_s=1.0),
        standing(3, still_s=5.0),
    ]
    assert front(standings) == Front(20, 5.0)
    assert front([]) == Front(0, 0.0)


def test_a_standing_survives_json() -> None:
    each = standing(3, done=True)
    assert Standing.from_plain(json.loads(json.dumps(each.to_plain()))) == each


counts = st.integers(0, 5)
seconds = st.floats(0, 100)


@st.composite
def groups(draw: st.DrawFn) -> list[Standing]:
    """Any ranks of a run, in any order."""
    size = draw(st.integers(1, 6))
    ranks = [
        standing(
            rank,
            pid=draw(st.sampled_from([0, 1000 + rank])),
            alive=draw(st.booleans()),
            stopped=draw(st.booleans()),
            phase=draw(st.sampled_from(Phase)),
            collectives=draw(counts),
            still_s=draw(seconds),
            silent_s=draw(seconds),
            done=draw(st.booleans()),
        )
        for rank in range(size)
    ]
    return list(draw(st.permutations(ranks)))


@given(groups())
def test_who_waits_is_never_blamed_while_another_is_behind(standings: list[Standing]) -> None:
    top = max(each.collectives for each in standings)
    late = behind(standings)
    if top > 0 and any(each.collectives < top for each in late):
        assert all(each.collectives < top or each.stopped for each in late)


@given(groups())
def test_only_who_can_come_is_waited_for(standings: list[Standing]) -> None:
    late, waited_s = lag(standings)
    assert all(each.alive and not each.done for each in late)
    assert len({each.rank for each in late}) == len(late)
    assert waited_s <= max(each.still_s for each in standings)
    assert waited_s == 0.0 or len(late) < len(standings)


@given(groups(), st.randoms())
def test_the_order_of_ranks_changes_nothing(standings: list[Standing], random: object) -> None:
    shuffled = list(standings)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert set(behind(shuffled)) == set(behind(standings))
    assert lag(shuffled)[1] == lag(standings)[1]


@given(st.integers(2, 6), st.data(), st.integers(1, 30), seconds)
def test_one_that_hangs_is_found(size: int, data: st.DataObject, collectives: int, waited_s: float) -> None:
    hung = data.draw(st.integers(0, size - 1))
    phase = data.draw(st.sampled_from([phase for phase in Phase if phase > Phase.MEETING]))
    standings = [standing(rank, collectives=collectives, still_s=waited_s + rank) for rank in range(size)]
    standings[hung] = replace(standings[hung], collectives=collectives - 1, phase=phase)
    late, found_s = lag(standings)
    assert ranks_of(late) == [hung]
    assert found_s == min(each.still_s for each in standings if each.rank != hung)
