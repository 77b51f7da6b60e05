"""Charts of a report: what is drawn stands for what was logged."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.internals import (
    CHART_LEFT,
    CHART_RIGHT,
    MAX_POINTS,
    Scale,
    chart,
    format_tick,
    run_color,
    thinned,
    ticks,
)

VALUES = st.lists(st.none() | st.floats(-1e6, 1e6), min_size=1, max_size=3 * MAX_POINTS)


@given(values=VALUES)
def test_a_thinned_curve_keeps_ends_and_extremes(values: list[float | None]) -> None:
    curve = list(enumerate(values))
    found = thinned(curve)
    assert len(found) <= MAX_POINTS
    assert (found[0], found[-1]) == (curve[0], curve[-1])
    assert found == sorted(found, key=lambda point: point[0])
    assert set(found) <= set(curve)
    finite = [value for value in values if value is not None]
    if finite:
        kept = [value for _, value in found if value is not None]
        assert (min(kept), max(kept)) == (min(finite), max(finite))


def test_thinning_keeps_a_spike_and_a_gap() -> None:
    curve: list[tuple[int, float | None]] = [(step, math.sin(step / 500)) for step in range(10_000)]
    curve[5_001] = (5_001, 40.0)
    curve[7_000:7_200] = [(step, None) for step in range(7_000, 7_200)]
    found = thinned(curve)
    assert len(found) <= MAX_POINTS
    assert (5_001, 40.0) in found
    drawn = chart([found, None], name="val/loss")
    # There is a line before and one after the gap.
    assert len(drawn.lines) == 2


@given(low=st.floats(-1e9, 1e9), size=st.floats(1e-3, 1e9))
def test_ticks_are_a_few_round_numbers_inside(low: float, size: float) -> None:
    found = ticks(low, low + size)
    margin = size * 1e-6
    assert 1 <= len(found) <= 6
    assert all(low - margin <= value <= low + size + margin for value in found)


@pytest.mark.parametrize("values", [[3.0, 3.0], [0.0], [], [-1e308, 1e308]], ids=str)
def test_every_value_has_a_place(values: list[float]) -> None:
    scale = Scale(values, CHART_LEFT, CHART_RIGHT)
    assert all(CHART_LEFT <= scale(value) <= CHART_RIGHT for value in values)
    assert ticks(scale.low, scale.high)


def test_ticks_are_short() -> None:
    shown = {0.25: "0.25", 2500: "2.5k", 1_200_000: "1.2M", 0: "0", 1e12: "1e+12", 1e-5: "1e-05"}
    assert {value: format_tick(value) for value in shown} == shown


def test_many_runs_look_different() -> None:
    assert len({run_color(number) for number in range(40)}) == 40


@pytest.mark.parametrize(("mode", "text"), [("min", "best: -1 at step 3"), ("max", "best: 4 at step 2")])
def test_the_best_value_is_marked(mode: str, text: str) -> None:
    curve: list[tuple[int, float | None]] = [(1, 2.0), (2, 4.0), (3, -1.0), (4, None), (5, 4.0)]
    drawn = chart([None, curve], name="val/loss", mode=mode)
    (mark,) = drawn.best
    assert (mark.text, mark.color) == (text, run_color(1))
    assert (mark.x, mark.y) in drawn.lines[0].places
    assert chart([None, curve], name="val/loss").best == []
