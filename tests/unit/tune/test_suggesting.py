"""Range tests whose curve is known: what is suggested, and where they end."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from framework.tune.suggesting import Curve, Point, Suggestion, suggest
from tests.unit.tune.curves import curve_of, loss_at


def suggested(curve: Curve) -> Suggestion:
    found = suggest(curve.points)
    assert found is not None
    return found


@pytest.mark.parametrize("noise", [0.0, 0.03])
@pytest.mark.parametrize("knee", [1e-5, 1e-3, 1e-1])
def test_the_suggestion_goes_with_the_curve(knee: float, noise: float) -> None:
    found = suggested(curve_of(lambda lr: loss_at(lr, knee=knee, edge=50 * knee), noise=noise))
    assert knee / 3 < found.lr < 8 * knee
    assert knee / 30 < found.begins < found.lr < found.minimum < 50 * knee


def test_the_suggestion_does_not_depend_on_where_the_test_begins() -> None:
    whole = curve_of(loss_at, noise=0.01)
    later = Curve(threshold=4.0)
    for point in whole.points[30:]:
        later.add(point.lr, point.loss)
    assert suggested(later).lr == pytest.approx(suggested(whole).lr, rel=0.3)


def test_the_scale_of_the_loss_does_not_matter() -> None:
    assert suggested(curve_of(lambda lr: 1000 * loss_at(lr))) == suggested(curve_of(loss_at))


def test_it_ends_where_the_loss_has_risen() -> None:
    curve = curve_of(loss_at)
    last = curve.points[-1]
    best = min(point.smoothed for point in curve.points if point.smoothed is not None)
    assert last.lr < 10 / 2
    assert last.smoothed is not None
    assert last.smoothed > 4 * best
    assert curve.stopped == f"the loss had risen to {last.smoothed:.3g} at {last.lr:.2g}, from {best:.3g}"


def test_without_a_threshold_it_goes_on() -> None:
    curve = curve_of(loss_at, threshold=None)
    assert (len(curve.points), curve.stopped) == (100, None)


def test_a_loss_below_zero_does_not_end_it_at_once() -> None:
    curve = curve_of(lambda lr: loss_at(lr) - 5.0)
    assert suggested(curve).minimum > 0.01
    assert curve.points[-1].lr > 0.5


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_ends_it_and_the_rest_counts(bad: float) -> None:
    curve = curve_of(lambda lr: loss_at(lr) if lr < 0.3 else bad)
    assert curve.points[-1].smoothed is None
    assert curve.stopped is not None
    assert curve.stopped.startswith(f"the loss was {bad} at 0.3")
    assert suggested(curve).minimum < 0.3


@pytest.mark.parametrize(
    "loss",
    [lambda _: 2.3, lambda lr: 2.3 + lr, lambda lr: 2.3 - 1e-4 * math.log10(lr / 1e-7), lambda _: math.nan],
    ids=["flat", "rising", "hardly falling", "never finite"],
)
def test_without_a_fall_nothing_is_suggested(loss: Callable[[float], float]) -> None:
    assert suggest(curve_of(loss).points) is None


@pytest.mark.parametrize("noise", [0.01, 0.3, 3.0])
def test_noise_alone_is_no_fall(noise: float) -> None:
    for seed in range(10):
        draw = random.Random(seed)
        assert suggest(curve_of(lambda _, draw=draw: 2.3 + noise * draw.gauss(0, 1), threshold=None).points) is None  # type: ignore[misc]


def test_nothing_is_suggested_from_nothing() -> None:
    assert suggest([]) is None
    assert suggest([Point(1e-7, 2.0, 2.0), Point(1e-6, 1.0, 1.5)]) is None
