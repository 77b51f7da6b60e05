"""What counts as a spike: the rate of false alarms, outliers among what is usual, lasting changes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from tests.helpers.internals import Usual

WINDOW = 128


def scores(draw: Callable[[random.Random], float], *, steps: int) -> list[float]:
    generator = random.Random(3)
    usual = Usual(WINDOW)
    found = []
    for _ in range(steps):
        value = draw(generator)
        found.append(usual.score(value))
        usual.values.append(value)
    return found


def student(generator: random.Random) -> float:
    """Student's t with 5 degrees of freedom."""
    return 5 + generator.gauss(0, 1) / math.sqrt(generator.gammavariate(2.5, 2) / 5)


@pytest.mark.parametrize(
    ("draw", "threshold", "per_million"),
    [
        pytest.param(lambda generator: generator.gauss(3, 0.5), 10, 0, id="normal"),
        pytest.param(student, 10, 73, id="heavy tails"),
        pytest.param(lambda generator: generator.expovariate(1), 10, 625, id="exponential"),
        pytest.param(lambda generator: generator.expovariate(1), 15, 20, id="exponential, a higher threshold"),
    ],
)
def test_false_alarms_are_as_rare_as_documented(
    draw: Callable[[random.Random], float], threshold: float, per_million: float
) -> None:
    """Alarms are rare events: their number varies by its root, of which four are allowed."""
    steps = 20_000
    alarms = sum(score > threshold for score in scores(draw, steps=steps))
    expected = per_million * steps / 1e6
    assert abs(alarms - expected) <= 4 * math.sqrt(expected)


def test_a_tenth_of_outliers_hides_none_of_them() -> None:
    generator = random.Random(4)
    usual = Usual(WINDOW)
    missed = 0
    for step in range(1, 2000):
        is_outlier = step % 10 == 0
        value = generator.gauss(100 if is_outlier else 3, 0.5)
        if is_outlier and step > WINDOW and usual.score(value) <= 10:
            missed += 1
        usual.values.append(value)
    assert missed == 0


def test_a_lasting_change_becomes_usual() -> None:
    generator = random.Random(5)
    usual = Usual(WINDOW, [generator.gauss(3, 0.5) for _ in range(WINDOW)])
    alarms = []
    for step in range(WINDOW):
        value = generator.gauss(30, 0.5)
        if usual.score(value) > 10:
            alarms.append(step)
        usual.values.append(value)
    assert alarms
    assert alarms[-1] <= WINDOW // 2


def test_nothing_is_judged_before_a_quarter_of_the_window() -> None:
    usual = Usual(WINDOW, [3.0] * (WINDOW // 4 - 1))
    assert usual.score(1e6) == 0
    usual.values.append(3.0)
    assert usual.score(1e6) > 10
    # A number that never changed isn't an outlier for a difference of rounding.
    assert usual.score(3.0001) < 1
