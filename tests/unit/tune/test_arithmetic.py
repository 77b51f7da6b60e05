"""What `job=tune` computes: which sizes to try, what a batch makes of a step, and what a range test suggests."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from framework.errors import ConfigError
from tests.helpers.internals import (
    BatchPlan,
    BatchSizing,
    Forecast,
    assess_lr_range,
    largest_fitting,
    micro_batches,
    plot,
    resolution,
)

SIZES = st.integers(1, 100_000)
NUMBERS = st.integers(1, 300)


# The search


@given(limit=st.integers(0, 200_000), start=SIZES, most=SIZES)
def test_the_found_size_is_the_largest_that_fits(limit: int, start: int, most: int) -> None:
    asked: list[int] = []

    def fits(size: int) -> bool:
        assert size <= max(start, 2 * max((each for each in asked if each <= limit), default=0))
        asked.append(size)
        return size <= limit

    found = largest_fitting(fits, start=start, most=most)
    assert len(asked) == len(set(asked)) <= 25
    assert all(1 <= size <= most for size in asked)
    assert found in (0, *asked)
    assert found == most or found <= limit < found + resolution(found)


class Searched(NamedTuple):
    """A search that starts from a forecast, where a step takes `fixed + slope * size` bytes."""

    size: int
    tried: list[int]


def search(*, slope: float, forecast: Forecast, room: int, most: int, fixed: int = 1000) -> Searched:
    tried: list[int] = []

    def fits(size: int) -> bool:
        assert size not in tried
        tried.append(size)
        return fixed + slope * size <= room

    def predict() -> int | None:
        return forecast.largest(room)

    return Searched(largest_fitting(fits, start=2, most=most, predict=predict), tried)


@given(slope=st.integers(1, 50), room=st.integers(0, 10**6), most=SIZES, error=st.floats(0.01, 100))
def test_a_wrong_forecast_costs_trials_and_no_more(slope: int, room: int, most: int, error: float) -> None:
    forecast = Forecast.of([(size, int(error * (1000 + slope * size))) for size in (8, 64)])
    size, tried = search(slope=slope, forecast=forecast, room=room, most=most)
    fitting = min(most, max(0, (room - 1000) // slope))
    assert size in (0, *tried)
    assert size == most or size <= fitting < size + resolution(size)
    assert all(1 <= size <= most for size in tried)
    assert len(tried) <= 25


def test_the_forecast_takes_three_trials_where_doubling_takes_more() -> None:
    for room in (20_000, 123_456, 1_000_000):
        exact = Forecast.of([(8, 1080), (64, 1640)])
        # Two percent too low and too high.
        for percent in (98, 100, 102):
            forecast = Forecast.of([(size, size_bytes * percent // 100) for size, size_bytes in exact.points])
            size, tried = search(slope=10, forecast=forecast, room=room, most=10**6)
            doubled = search(slope=10, forecast=Forecast(()), room=room, most=10**6)
            assert size == doubled.size
            assert len(tried) <= 3 < 9 <= len(doubled.tried)


@pytest.mark.parametrize(
    ("points", "room", "expected"),
    [
        pytest.param([], 100, None, id="no forecast"),
        pytest.param([(8, 80)], 100, None, id="one point"),
        pytest.param([(8, 80), (64, 80)], 100, None, id="it doesn't grow"),
        pytest.param([(8, 80), (64, 640)], 1000, 100, id="above"),
        pytest.param([(8, 80), (64, 640)], 320, 32, id="between"),
        pytest.param([(8, 80), (64, 640)], 40, 4, id="below"),
        pytest.param([(8, 280), (64, 840)], 100, 0, id="nothing fits"),
        pytest.param([(8, 80), (64, 80), (100, 800)], 440, 82, id="the part that grows"),
    ],
)
def test_the_largest_batch_of_a_forecast(points: list[tuple[int, int]], room: int, expected: int | None) -> None:
    assert Forecast.of(points).largest(room) == expected


# What a batch makes of a step


def test_a_batch_for_each_process() -> None:
    sizing = BatchSizing(world_size=2, accumulate=3, global_batch_size=None, samples=1000)
    assert [sizing.most(limit) for limit in (None, 50)] == [(166, "data"), (50, "tune.max_batch_size")]
    assert (sizing.trial(10), sizing.plan(10)) == (BatchPlan(40, 2, 2), BatchPlan(60, 3, 2))
    few = BatchSizing(world_size=2, accumulate=4, global_batch_size=None, samples=5)
    assert few.most(None) == (1, "data")


def test_a_global_batch_keeps_its_size() -> None:
    sizing = BatchSizing(world_size=2, accumulate=1, global_batch_size=100, samples=1000)
    assert sizing.most(None) == (50, "data.global_batch_size")
    assert [sizing.plan(size) for size in (50, 40)] == [BatchPlan(100, 1, 2), BatchPlan(100, 2, 2)]
    assert (sizing.pass_size(40), sizing.trial(10)) == (25, BatchPlan(40, 2, 2))
    larger_than_the_data = BatchSizing(world_size=2, accumulate=1, global_batch_size=1600, samples=5)
    assert larger_than_the_data.most(None) == (3, "data")


@given(world=st.integers(1, 8), whole=NUMBERS, size=NUMBERS, samples=NUMBERS)
def test_no_pass_is_larger_than_what_fits(world: int, whole: int, size: int, samples: int) -> None:
    assume(whole >= world)
    sizing = BatchSizing(world_size=world, accumulate=1, global_batch_size=whole, samples=samples)
    if sizing.passes(size) * world > whole:
        with pytest.raises(ConfigError, match=f"data.global_batch_size={whole} is less than one sample for each"):
            sizing.plan(size)
        return
    for made in (sizing.plan(size), sizing.trial(size)):
        count = min(made.global_batch_size, samples)
        sizes: list[int] = []
        for rank in range(world):
            sizes += map(len, micro_batches(made, global_count=count, rank=rank))
        assert sum(sizes) == count
        assert max(sizes) <= sizing.pass_size(size) <= size


# The range test


def loss_at(lr: float, *, knee: float = 1e-2, edge: float = 0.5) -> float:
    """2.3, falling about `knee` to 0.3, and beyond `edge` rising without end."""
    return 2.3 - 2.0 / (1 + (knee / lr) ** 1.5) + (lr / edge) ** 3


def found(loss: Callable[[float], float], *, noise: float = 0.0, threshold: float | None = 4.0) -> dict[str, Any]:
    """What tune.json has of a test with this loss."""
    draws = random.Random(3)
    rates = (1e-7 * 10 ** (8 * number / 99) for number in range(100))
    return assess_lr_range(((lr, loss(lr) * (1 + noise * draws.gauss(0, 1))) for lr in rates), threshold=threshold)


@pytest.mark.parametrize("knee", [1e-5, 1e-3, 1e-1])
def test_the_suggestion_moves_with_the_curve(knee: float) -> None:
    best = found(lambda lr: loss_at(lr, knee=knee, edge=50 * knee), noise=0.03)["suggestion"]
    assert knee / 3 < best["lr"] < 8 * knee
    assert knee / 30 < best["begins"] < best["lr"] < best["minimum"] < 50 * knee


def test_the_suggestion_ignores_scale_and_first_rate() -> None:
    whole = found(loss_at, noise=0.01)
    later = assess_lr_range([(point["lr"], point["loss"]) for point in whole["points"][30:]], threshold=4.0)
    assert later["suggestion"]["lr"] == pytest.approx(whole["suggestion"]["lr"], rel=0.3)
    assert found(lambda lr: 1000 * loss_at(lr))["suggestion"] == found(loss_at)["suggestion"]


def test_where_the_test_ends() -> None:
    curve = found(loss_at)
    smoothed = [point["smoothed"] for point in curve["points"]]
    assert smoothed[-2] <= 4 * min(smoothed) < smoothed[-1]
    assert curve["stopped"].startswith(f"the loss had risen to {smoothed[-1]:.3g} at {curve['points'][-1]['lr']:.2g}")
    assert len(found(loss_at, threshold=None)["points"]) == 100
    # A loss below zero hasn't risen yet.
    assert found(lambda lr: loss_at(lr) - 5.0)["points"][-1]["lr"] > 0.5
    for bad in (math.nan, math.inf):
        curve = found(lambda lr, bad=bad: loss_at(lr) if lr < 0.3 else bad)  # type: ignore[misc]
        assert curve["stopped"].startswith(f"the loss was {bad} at 0.3")
        assert curve["suggestion"]["minimum"] < 0.3


@pytest.mark.parametrize(
    "loss",
    [lambda _: 2.3, lambda lr: 2.3 + lr, lambda lr: 2.3 - 1e-4 * math.log10(lr / 1e-7), lambda _: math.nan],
    ids=["flat", "rising", "hardly falling", "never finite"],
)
def test_without_a_fall_nothing_is_suggested(loss: Callable[[float], float]) -> None:
    assert found(loss)["suggestion"] is None


@pytest.mark.parametrize("noise", [0.01, 3.0])
def test_noise_alone_is_no_fall(noise: float) -> None:
    for seed in range(10):
        draws = random.Random(seed)
        assert found(lambda _, d=draws: 2.3 + noise * d.gauss(0, 1), threshold=None)["suggestion"] is None  # type: ignore[misc]


def test_any_losses_can_be_plotted() -> None:
    pytest.importorskip("matplotlib")
    for losses in ([math.nan], [1.0], [2.0, 2.0, 2.0], [1e30, 1.0, 1e-30, math.inf]):
        curve = assess_lr_range([(10.0 ** (number - 7), loss) for number, loss in enumerate(losses)], threshold=None)
        ElementTree.fromstring(plot(curve, title="$a < b & c"))
    image = plot(found(loss_at), title="toy: 8 samples per step")
    for label in ("suggested 0.", "falls from 0.", "lowest at 0.", "a tenth of that 0."):
        assert f"<!-- {label}" in image
