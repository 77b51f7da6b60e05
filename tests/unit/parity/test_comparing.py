from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from framework.parity.comparing import (
    Difference,
    common_factor,
    compare_layers,
    compare_step,
    row_difference,
    tensor_difference,
)
from framework.parity.trace import ENTERED, LEFT, Event, Passage, StepTrace

BASE = 1e-5
VIEW = "first 1 2"
ROWS = torch.tensor([[3.0, 0.0], [0.0, 4.0], [5.0, 0.0], [0.0, 6.0]])  # of samples 0 to 3


def event(rows: Tensor, module: str = "a", *, drew: bool = False, view: str = VIEW, kind: str = LEFT) -> Event:
    return Event(kind, module, "Linear", "", 1, drew, True, False, (Passage({view: rows}, is_leading=True),))


def trace(indices: list[int], *events: Event) -> StepTrace:
    return StepTrace(torch.tensor(indices, dtype=torch.int64), events, {}, {}, {}, {})


def alone(*events: Event) -> StepTrace:
    return trace([0, 1, 2, 3], *events)


def layers(one: StepTrace, *many: StepTrace, moved: StepTrace | None = None) -> list[tuple[str, bool]]:
    found = compare_layers(one, one if moved is None else moved, many, base=BASE)
    return [(layer.event.module, layer.difference.departs) for layer in found]


def test_rows_are_brought_into_the_order_of_samples() -> None:
    ranks = trace([3, 0], event(ROWS[[3, 0]])), trace([2, 1], event(ROWS[[2, 1]]))
    assert layers(alone(event(ROWS)), *ranks) == [("a", False)]
    assert layers(trace([2, 3, 1, 0], event(ROWS[[2, 3, 1, 0]])), *ranks) == [("a", False)]
    assert layers(alone(event(ROWS)), *reversed(ranks)) == [("a", False)]


def test_rows_of_other_samples_depart() -> None:
    ranks = trace([3, 0], event(ROWS[[0, 3]])), trace([2, 1], event(ROWS[[2, 1]]))
    assert layers(alone(event(ROWS)), *ranks) == [("a", True)]


def test_a_rank_without_samples_has_no_say() -> None:
    empty = trace([], event(ROWS[:0]))
    assert layers(alone(event(ROWS)), alone(event(ROWS)), empty) == [("a", False)]


def test_what_moved_weights_change_is_allowed_fourfold() -> None:
    moved, off = alone(event(ROWS * 1.01)), alone(event(ROWS * 1.03))
    assert layers(alone(event(ROWS)), off, moved=moved) == [("a", False)]
    assert layers(alone(event(ROWS)), alone(event(ROWS * 1.06)), moved=moved) == [("a", True)]


def test_the_path_is_compared_as_far_as_it_is_one() -> None:
    one = alone(event(ROWS), event(ROWS, "b"), event(ROWS, "c"))
    other = alone(event(ROWS), event(ROWS, "b"), event(ROWS, "d"))
    assert layers(one, other) == [("a", False), ("b", False)]
    assert layers(one, replace(other, events=None)) == []


def test_draws_count_since_the_last_that_could_be_compared() -> None:
    nothing = replace(event(ROWS, "b", drew=True), passages=())
    events = event(ROWS), nothing, event(ROWS, "c", kind=ENTERED)
    found = list(compare_layers(alone(*events), alone(*events), [alone(*events)], base=BASE))
    assert [(layer.event.module, layer.drew) for layer in found] == [("a", False), ("c", True)]
    assert found[1].before == events[0]


def test_another_size_for_each_sample_departs() -> None:
    pairs = event(ROWS, view="first 1 4"), event(ROWS[:2], view="first 1 2")
    (found,) = compare_layers(alone(pairs[0]), alone(pairs[0]), [trace([0, 1], pairs[1])], base=BASE)
    assert found.has_other_shape
    assert found.difference.departs


def test_of_several_readings_the_one_that_fits_counts() -> None:
    views = {"first 4 2": ROWS, "first, turned 4 2": ROWS}
    other = {"first 4 2": ROWS.flip(0), "first, turned 4 2": ROWS}
    one, two = (replace(event(ROWS), passages=(Passage(each, is_leading=False),)) for each in (views, other))
    assert layers(alone(one), alone(two)) == [("a", False)]


def test_a_sample_far_off_is_not_lost_among_many() -> None:
    one = torch.ones(1000, 4)
    other = one.clone()
    other[7] *= 1.5
    assert row_difference(one, other) == pytest.approx(0.5, rel=1e-3)
    assert row_difference(one, one) == 0.0
    assert row_difference(torch.zeros(2, 3), torch.ones(2, 3)) == pytest.approx(1.0)


def test_tensors() -> None:
    one = torch.tensor([3.0, 4.0])
    assert tensor_difference(one, one) == 0.0
    assert tensor_difference(one, 2 * one) == 0.5
    assert tensor_difference(one, None) == 1.0
    assert tensor_difference(None, torch.zeros(2)) == tensor_difference(None, None) == 0.0
    assert tensor_difference(torch.zeros(2), torch.zeros(2)) == 0.0
    assert tensor_difference(one, torch.ones(3)) == float("inf")


def test_not_a_number_departs() -> None:
    assert Difference("a", float("nan"), allowed=1.0, rounding=0.0).departs


def test_a_common_factor() -> None:
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0])
    gradients = {"a": a, "b": b, "c": None}
    assert common_factor(gradients, {"a": a / 2, "b": b / 2, "c": None}, tolerance=1e-6) == 0.5
    assert common_factor(gradients, {"a": a / 2, "b": b, "c": None}, tolerance=1e-6) is None
    assert common_factor({"c": None}, {"c": None}, tolerance=1e-6) is None


def full(gradient: float, change: float, *, norm: float = 1.0, buffer: float = 1.0) -> StepTrace:
    return StepTrace(
        torch.tensor([0]),
        (),
        {"w": torch.tensor([float(gradient)])},
        {"w": torch.tensor([float(change)])},
        {"w": norm},
        {"b": torch.tensor([float(buffer)])},
    )


def test_each_part_is_compared_by_itself() -> None:
    one = full(1.0, 1.0)
    for other, part in ((full(2, 1), "gradients"), (full(1, 2), "weights"), (full(1, 1, buffer=2), "buffers")):
        step = compare_step(one, one, [other], unit=2.0**-24)
        assert not step.is_same
        assert [each for each in ("gradients", "weights", "buffers") if step.departing(each)] == [part]
    assert compare_step(one, one, [one], unit=2.0**-24).is_same


def test_the_rank_that_departs_is_named_and_buffers_are_the_firsts() -> None:
    one = full(1.0, 1.0)
    step = compare_step(one, one, [one, full(1, 2, buffer=3)], unit=2.0**-24)
    assert step.departing("weights")[0].rank == 1
    assert step.departing("buffers") == []


def test_a_change_of_less_than_the_weights_own_rounding_is_allowed() -> None:
    one, other = full(1, 1e-8), full(1, 6e-8)
    assert compare_step(one, one, [other], unit=2.0**-24).is_same
    assert not compare_step(full(1, 1e-8, norm=1e-6), one, [other], unit=2.0**-24).is_same
