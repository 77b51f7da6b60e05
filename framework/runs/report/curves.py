"""Charts of metrics over steps: a line for each run. page.html draws them as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

# Steps in order, and the values; None where the value wasn't finite.
Curve = list[tuple[int, float | None]]

# The whole chart in SVG units, about one pixel each on a phone.
WIDTH = 400
HEIGHT = 232
# The plot area in it.
LEFT = 48
RIGHT = 392
TOP = 8
BOTTOM = 194
# In style.css. Runs take the colors in turn, first with solid lines, then with each pattern.
NUM_COLORS = 12
NUM_PATTERNS = 4
# Points of a curve: one for each unit.
MAX_POINTS = WIDTH
_NUM_TICKS = 4


@dataclass(frozen=True)
class Line:
    """A stretch of a curve: places in SVG units. One place is drawn as a dot, since its line can't be seen."""

    # CSS classes.
    color: str
    places: list[tuple[float, float]]


@dataclass(frozen=True)
class Mark:
    """A point of a curve that is marked."""

    # CSS classes.
    color: str
    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Chart:
    """What is drawn of one metric."""

    name: str
    # The first and last step.
    low: float
    high: float
    # Places and labels of the axes.
    y_ticks: list[tuple[float, str]]
    x_ticks: list[tuple[float, str]]
    lines: list[Line]
    # The best value of each run: its color, its place, and what it is. None are marked if what is better isn't known.
    best: list[Mark]


def thinned(curve: Curve, *, max_points: int = MAX_POINTS) -> Curve:
    """Return at most `max_points` points that look the same: the minimum and maximum of each stretch, and both ends."""
    if len(curve) <= max_points:
        return curve
    first, *inner, last = curve
    size = math.ceil(len(curve) / (max_points // 2 - 1))
    points = [first]
    for start in range(0, len(inner), size):
        stretch = inner[start : start + size]
        finite = [point for point in stretch if point[1] is not None]
        if finite:
            extremes = {min(finite, key=_value), max(finite, key=_value)}
            points += sorted(extremes, key=lambda point: point[0])
        else:
            points.append(stretch[0])
    points.append(last)
    return points


def chart(curves: Sequence[Curve | None], *, name: str, mode: str | None = None) -> Chart:
    """Return the chart of one metric.

    Args:
        curves: one for each run, None for a run without it.
        mode: `min` or `max` marks each run's best value.
    """
    # The scales are those of all curves.
    steps = []
    values = []
    for curve in curves:
        for step, value in curve or []:
            if value is not None:
                steps.append(step)
                values.append(value)
    x = Scale(steps, LEFT, RIGHT)
    y = Scale(values, BOTTOM, TOP)
    whole_steps = [step for step in ticks(x.low, x.high) if step == int(step)]
    x_ticks = [(x(step), format_tick(step)) for step in whole_steps]
    y_ticks = [(y(value), format_tick(value)) for value in ticks(y.low, y.high)]

    lines = []
    for number, curve in enumerate(curves):
        for stretch in _finite(curve or []):
            places = [(x(step), y(value)) for step, value in stretch]
            lines.append(Line(color(number), places))
    best = []
    for number, curve in enumerate(curves):
        point = best_point(curve or [], mode=mode)
        if point is not None:
            step, value = point
            best.append(Mark(color(number), x(step), y(value), f"best: {value:.4g} at step {step:,}"))
    return Chart(name, low=x.low, high=x.high, y_ticks=y_ticks, x_ticks=x_ticks, lines=lines, best=best)


def best_point(curve: Curve, *, mode: str | None) -> tuple[int, float] | None:
    """Return the step and the value of the first best point; None if there is none, or `mode` is None."""
    points = [(step, value) for step, value in curve if value is not None]
    if mode is None or not points:
        return None
    choose = min if mode == "min" else max
    return choose(points, key=lambda point: point[1])


def color(number: int) -> str:
    """Return the CSS classes of the run with this index."""
    return f"c{number % NUM_COLORS} p{number // NUM_COLORS % NUM_PATTERNS}"


class Scale:
    """Map values to coordinates. If all values are equal, they are in the middle."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        self.low = min(values, default=0.0)
        self.high = max(values, default=1.0)
        if self.low == self.high:
            margin = abs(self.low) / 2 or 1.0
            self.low -= margin
            self.high += margin
        self._start = start
        self._end = end

    def __call__(self, value: float) -> float:
        # Divided first: a difference of large floats may be infinite.
        share = (value / 2 - self.low / 2) / (self.high / 2 - self.low / 2)
        return self._start + share * (self._end - self._start)


def ticks(low: float, high: float) -> list[float]:
    """Return a few round numbers from `low` to `high`."""
    rough = high / _NUM_TICKS - low / _NUM_TICKS
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough * 0.999)
    # The margins take up errors of rounding.
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def format_tick(value: float) -> str:
    """Return `0.25`, `2.5k`, `1.2M`, `1e+09`, `1e-05`."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if size <= abs(value) < 1e9:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"


def _value(point: tuple[int, float | None]) -> float:
    return 0.0 if point[1] is None else point[1]


def _finite(curve: Curve) -> Iterator[list[tuple[int, float]]]:
    """Yield the stretches of a curve between values that are not finite."""
    for is_gap, points in groupby(curve, key=lambda point: point[1] is None):
        if not is_gap:
            yield [(step, value) for step, value in points if value is not None]
