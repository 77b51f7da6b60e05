"""Whom the times of all ranks make out to be slow, in what, and by how much."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.slow_ranks import (
    CURVES_OF_RANKS,
    KINDS,
    LAST_STRETCHES,
    OF_THEM,
    STRETCH_S,
    SlowRank,
    SlowRanks,
    Spent,
    excesses,
)

STEP_S = 0.1
STEPS = 10
"""In a second, so that every log is a stretch of its own."""

Own = Callable[[int, int], dict[str, float]]
"""(log, rank) → own seconds of a step beyond 10 ms of data, 50 of computing and 1 of callbacks."""


def spent(**more: float) -> Spent:
    """Ten steps: whatever is not a rank's own, it waits."""
    usual = {"data": 0.01, "compute": 0.05, "callbacks": 0.001}
    own = {kind: seconds + more.get(kind, 0.0) for kind, seconds in usual.items()}
    waiting = STEP_S - sum(own.values())
    return Spent(STEPS, STEPS * STEP_S, **{kind: STEPS * s for kind, s in own.items()}, waiting=STEPS * waiting)


def tell(ranks: SlowRanks, table: Sequence[Spent], *, step: int) -> dict[str, float]:
    return ranks.note([number for each in table for number in each], step=step)


def judged(own: Own, *, world_size: int = 4, logs: int = 10) -> tuple[SlowRanks, list[tuple[int, str]]]:
    """After so many logs: and what was told, by step."""
    ranks = SlowRanks(rank=0, world_size=world_size)
    ranks.start([f"node{rank // 2}, cuda:{rank % 2}" for rank in range(world_size)], step=0)
    told = []
    for log in range(1, logs + 1):
        tell(ranks, [spent(**own(log, rank)) for rank in range(world_size)], step=log * STEPS)
        if ranks.news is not None:
            told.append((log * STEPS, ranks.news))
    return ranks, told


def named(ranks: SlowRanks) -> list[str]:
    return [str(each) for each in ranks.found()]


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_the_slow_rank_and_no_other_is_named_with_what_a_step_would_gain(kind: str, world_size: int) -> None:
    ranks, told = judged(lambda _, rank: {kind: 0.018} if rank == 1 else {}, world_size=world_size)
    assert named(ranks) == [f"rank 1 (node0, cuda:1) is 18 % slower in {kind}"]
    assert told == [(40, f"Rank 1 (node0, cuda:1) is 18 % slower in {kind} than the others, since step 1")]


def test_those_who_wait_are_not_blamed() -> None:
    """Rank 1 takes 30 ms longer; the others wait for as long in the same step."""
    table = [spent(compute=0.03 * (rank == 1)) for rank in range(2)]
    assert table[0].waiting > table[1].waiting
    assert excesses(table, "compute") == pytest.approx([-0.3, 0.3])
    assert excesses(table, "data") == pytest.approx([0.0, 0.0])


def test_ranks_may_be_slow_each_in_something_else() -> None:
    slow = {0: {"compute": 0.02}, 1: {"data": 0.03}, 2: {"callbacks": 0.011}}
    ranks, told = judged(lambda _, rank: slow.get(rank, {}))
    assert [(each.rank, each.kind) for each in ranks.found()] == [(1, "data"), (0, "compute"), (2, "callbacks")]
    assert told == [
        (40, "Rank 1 (node0, cuda:1) is 30 % slower in data than the others, since step 1, and 2 more such")
    ]


def test_a_little_slower_is_not_slow() -> None:
    ranks, told = judged(lambda _, rank: {"compute": 0.0095} if rank == 1 else {})
    assert (named(ranks), told) == ([], [])


@pytest.mark.parametrize("log", range(1, 11))
def test_a_stretch_that_was_slow_once_or_at_times_is_noise(log: int) -> None:
    assert named(judged(lambda now, rank: {"data": 0.03} if rank == 1 and now == log else {})[0]) == []
    ranks, told = judged(lambda now, rank: {"data": 0.03} if rank == 1 and now % 5 in (log % 5, 0, 1) else {})
    assert (named(ranks), told) == ([], [])


def test_noise_that_hits_one_rank_after_another_names_nobody() -> None:
    ranks, told = judged(lambda log, rank: {"compute": 0.05} if log % 4 == rank else {}, logs=40)
    assert (named(ranks), told) == ([], [])


def test_who_becomes_slow_late_is_named_with_the_steps() -> None:
    ranks, told = judged(lambda log, rank: {"data": 0.02} if rank == 3 and log > 90 else {}, logs=100)
    assert named(ranks) == ["rank 3 (node1, cuda:1) is 20 % slower in data (steps 901 to 1,000)"]
    assert told == [(940, "Rank 3 (node1, cuda:1) is 20 % slower in data than the others, since step 901")]


def test_who_was_slow_for_a_while_was_told_once_and_is_named_only_if_it_was_most_of_the_run() -> None:
    ranks, told = judged(lambda log, rank: {"data": 0.02} if rank == 3 and log % 20 < 8 else {}, logs=57)
    assert named(ranks) == []
    assert len(told) == 1
    ranks, _ = judged(lambda log, rank: {"data": 0.02} if rank == 3 and log <= 60 else {}, logs=100)
    assert named(ranks) == ["rank 3 (node1, cuda:1) is 20 % slower in data (steps 1 to 600)"]


def test_short_runs_name_nobody() -> None:
    assert named(judged(lambda _, rank: {"data": 0.03 * (rank == 1)}, logs=OF_THEM - 1)[0]) == []
    ranks = SlowRanks(rank=0, world_size=2)
    for log in range(LAST_STRETCHES):
        short = [Spent(*(number * STRETCH_S * 0.19 for number in spent(data=0.03 * rank))) for rank in range(2)]
        values = tell(ranks, short, step=log)
        assert values["skew/worst"] == pytest.approx(0.3)
    assert named(ranks) == []


def test_short_logs_are_judged_together() -> None:
    ranks = SlowRanks(rank=0, world_size=2)
    ranks.start(["a, cpu", "b, cpu"], step=100)
    for log in range(1, 1 + 4 * 5):
        short = [Spent(*(number / 8 for number in spent(data=0.03 * rank))) for rank in range(2)]
        tell(ranks, short, step=100 + log)
    assert named(ranks) == ["rank 1 (b, cpu) is 30 % slower in data"]
    assert ranks.found()[0].first_step == 101


def test_steps_that_a_rank_does_not_know_are_left_out() -> None:
    ranks, _ = judged(lambda _, rank: {"data": 0.03 * (rank == 1)}, logs=3)
    before = named(ranks)
    assert tell(ranks, [Spent(), *[spent()] * 3], step=40) == {}
    assert tell(ranks, [Spent()] * 4, step=40) == {}
    assert named(ranks) == before


def test_a_rank_is_slow_since_the_first_steps_that_are_known() -> None:
    ranks = SlowRanks(rank=0, world_size=2)
    ranks.start(["a, cpu", "b, cpu"], step=100)
    tell(ranks, [Spent()] * 2, step=107)
    for step in range(110, 150, 10):
        tell(ranks, [spent(), spent(data=0.03)], step=step)
    assert ranks.news == "Rank 1 (b, cpu) is 30 % slower in data than the others, since step 108"


def test_what_is_logged_are_shares_of_a_step_and_how_far_ranks_are_apart() -> None:
    ranks = SlowRanks(rank=0, world_size=2)
    values = tell(ranks, [spent(), spent(data=0.02)], step=10)
    assert values == {
        "time/data": pytest.approx(0.2),
        "time/waiting": pytest.approx((0.039 + 0.019) / 2 / STEP_S),
        "skew/worst": pytest.approx(0.2),
        "skew/slowest_rank": 1.0,
        "skew/rank_0": pytest.approx(-0.2),
        "skew/rank_1": pytest.approx(0.2),
    }
    even = tell(ranks, [spent(), spent(data=0.002)], step=20)
    assert "skew/slowest_rank" not in even
    unknown = tell(ranks, [spent()._replace(waiting=0.0, compute=0.0)] * 2, step=30)
    assert "time/waiting" not in unknown
    assert tell(SlowRanks(rank=0, world_size=1), [spent()], step=10) == {"time/data": pytest.approx(0.1)}


def test_many_ranks_have_no_curve_each() -> None:
    world_size = CURVES_OF_RANKS + 1
    ranks = SlowRanks(rank=0, world_size=world_size)
    values = tell(ranks, [spent()] * world_size, step=10)
    assert values.keys() == {"time/data", "time/waiting", "skew/worst"}


def test_rows_of_all_ranks_add_up_to_the_table() -> None:
    table = [spent(data=0.01 * rank) for rank in range(3)]
    rows = [SlowRanks(rank=rank, world_size=3).row(own) for rank, own in enumerate(table)]
    assert [sum(column) for column in zip(*rows, strict=True)] == [number for own in table for number in own]


@given(st.lists(st.floats(0.0, 0.5), min_size=2, max_size=9))
def test_the_median_is_of_the_others(own: list[float]) -> None:
    table = [Spent(steps=1, step=1.0, data=seconds) for seconds in own]
    expected = [mine - median(own[:rank] + own[rank + 1 :]) for rank, mine in enumerate(own)]
    assert excesses(table, "data") == pytest.approx(expected, abs=1e-12)


def test_a_named_rank_survives_being_written_down() -> None:
    slow = SlowRank(3, "node1, cuda:3", "data", 0.18, 1, 600, throughout=False)
    assert SlowRank.from_plain(slow.to_plain()) == slow
