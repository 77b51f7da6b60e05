"""One rank kills itself, hangs, stops or is late: one of each kind that `benchmarks/failures.py` draws by the hundred.

And the report of it is for people, too: what it says is looked at in `tests/unit/launch/`.
"""

from __future__ import annotations

import pytest

from benchmarks.failures import DEEDS, Case, Result, draw, run, table, wrong_in_report
from tests.helpers.trouble import EVERY, PHASES, Deed

pytestmark = pytest.mark.multiproc

TIMEOUT_S = 5.0
ESSENTIAL = {"SIGKILL", "SIGSTOP", "raise"}  # killed, there but silent, and with a traceback of its own
SEEDS = {what: number for number, what in enumerate(DEEDS)}  # with them every phase is there, and rank 0


def case(what: str) -> Case:
    return draw(SEEDS[what], processes=(2, 3), whats=[what], timeout_s=TIMEOUT_S)


def test_every_phase_is_there_and_rank_0_too() -> None:
    deeds = [case(what).deed for what in DEEDS]
    assert {deed.phase for deed in deeds} == set(PHASES)
    assert {deed.rank for deed in deeds} >= {0, 1}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "what",
    [what if what in ESSENTIAL else pytest.param(what, marks=pytest.mark.exhaustive) for what in DEEDS],
)
def test_what_one_rank_does_is_told_right(what: str) -> None:
    assert run(case(what)).wrong == ()


def test_a_seed_gives_the_same_case_always() -> None:
    given = [
        draw(seed, processes=(2, 8), whats=list(DEEDS), timeout_s=TIMEOUT_S) for seed in (*range(300), *range(300))
    ]
    assert given[:300] == given[300:]
    assert {each.num_processes for each in given} == set(range(2, 9))
    assert {(each.deed.what, each.deed.phase) for each in given} == {
        (what, phase) for what in DEEDS for phase in PHASES
    }
    assert all(0 <= each.deed.rank < each.num_processes for each in given)
    assert all(1 < each.deed.step < 3 * EVERY for each in given)  # there are steps before and after it


FIRST = {
    "rank": 1,
    "pid": 42,
    "node": 0,
    "local_rank": 1,
    "kind": "hung",
    "signal": None,
    "phase": "data",
    "step": 4,
    "exception": None,
    "stacks": "Current thread",
}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, []),
        ({"step": 6}, []),
        ({"step": 7}, ["step is 7, not 5"]),
        ({"rank": 0}, ["rank is 0, not 1"]),
        ({"pid": 43}, ["pid is 43, not 42"]),
        ({"kind": "stopped"}, ["kind is 'stopped', not 'hung'"]),
        ({"phase": "forward"}, ["phase is 'forward', not 'data'"]),
        ({"signal": "SIGKILL"}, ["signal is 'SIGKILL', not None"]),
        ({"stacks": ""}, ["no Python stacks of the rank, which lived"]),
    ],
)
def test_a_wrong_report_is_seen(changed: dict[str, object], said: list[str]) -> None:
    hung = Case(seed=0, num_processes=2, deed=Deed("sleep", rank=1, phase="data", step=5), timeout_s=TIMEOUT_S)
    assert list(wrong_in_report(hung, {**FIRST, **changed}, done={"rank": 1, "pid": 42})) == said


def test_the_table_counts() -> None:
    def result(what: str, *wrong: str, latency_s: float | None) -> Result:
        return Result(Case(seed=0, num_processes=2, deed=Deed(what), timeout_s=TIMEOUT_S), wrong, latency_s)

    shown = table(
        [result("raise", latency_s=0.5), result("raise", "x", latency_s=2.0), result("delay", latency_s=None)]
    )
    assert shown.splitlines()[2:] == ["| raise | 2 | 1 | 2.0 |", "| delay | 1 | 1 | – |", "| all | 3 | 2 | 2.0 |"]
