from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from framework.launch.board import Board, Presence


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


@pytest.fixture
def board(store: dist.Store) -> Board:
    return Board(store)


SAID: list[tuple[Callable[[Board], Any], Callable[[Board], Any], Any]] = [
    (lambda b: b.arrive(Presence(1, "a", 7, 3)), lambda b: b.presence(1), Presence(1, "a", 7, 3)),
    (lambda b: b.wish_to_stop(15), lambda b: b.stop_wish(), 15),
    (lambda b: b.decide_stop(8), lambda b: b.stop_step(), 8),
    (lambda b: b.raise_alarm(1, "why: 'ä'"), lambda b: b.alarm(), {"node": 1, "cause": "why: 'ä'"}),
    (lambda b: b.state(1, {"x": [1]}), lambda b: b.statement(1), {"x": [1]}),
    (lambda b: b.publish({"x": None}), lambda b: b.report(), {"x": None}),
    (lambda b: b.pulse(2, {"counter": 4}), lambda b: b.pulse_of(2), {"counter": 4}),
]


@pytest.mark.parametrize(("say", "hear", "value"), SAID)
def test_what_is_said_is_heard_in_that_attempt_alone(store: dist.Store, say: Any, hear: Any, value: Any) -> None:
    one, same, later = Board(store), Board(store), Board(store, attempt=1)
    assert hear(one) is None
    say(one)
    assert hear(same) == value
    assert hear(later) is None


def test_who_watches_is_known(board: Board) -> None:
    assert not board.is_watching(0)
    board.watch_from(0)
    assert board.is_watching(0)
    assert not board.is_watching(1)


def test_the_first_wish_to_stop_counts(board: Board) -> None:
    board.wish_to_stop(15)
    board.wish_to_stop(2)
    assert board.stop_wish() == 15


def test_ranks_are_counted(store: dist.Store) -> None:
    assert [Board(store).count_for_stop() for _ in range(3)] == [1, 2, 3]
    assert Board(store, attempt=1).count_for_stop() == 1


def test_a_nodes_pulse_and_statement_are_its_own(board: Board) -> None:
    for node in range(2):
        board.pulse(node, {"counter": node})
        board.state(node, {"node": node})
    assert [board.pulse_of(node) for node in range(3)] == [{"counter": 0}, {"counter": 1}, None]
    assert [board.statement(node) for node in range(3)] == [{"node": 0}, {"node": 1}, None]
