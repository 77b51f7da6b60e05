"""The curve of a range test as an SVG of its own: no library draws it, and no font is loaded. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from framework.tune.suggesting import Point, Suggestion

_WIDTH, _HEIGHT = 860, 480
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 24, 72, 60
_GREY, _INK, _GRID = "#9aa5b1", "#243b53", "#e4e7eb"
_CURVE, _CHOSEN, _OTHER = "#2166ac", "#d6604d", "#5aae61"
_STYLE = "font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;font-size:13px"
_NICE = (1, 2, 2.5, 5, 10)
_LINES = 6  # about so many on the axis of the loss
_DECADES = 12  # labels on the axis of the rate, at most
_FAR, _NEAR = 1e300, 1e-290  # losses beyond and differences below can't be reckoned with


def draw(points: Sequence[Point], suggestion: Suggestion | None, *, title: str) -> str:
    """The loss over the learning rate, smoothed as a line and as it came as dots, and the rates that are suggested."""
    axes = _Axes(points)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" style="{_STYLE}" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<clipPath id="plot"><rect x="{_LEFT}" y="{_TOP}" width="{axes.width}" height="{axes.height}"/></clipPath>',
        _text(_LEFT, 26, title, size=16, weight=600),
        *_grid(axes),
        '<g clip-path="url(#plot)">',
        *(_dot(axes, point) for point in points if math.isfinite(point.loss)),
        _line(axes, points),
        "</g>",
        *(_marks(axes, suggestion) if suggestion is not None else ()),
        *(() if any(math.isfinite(each.loss) for each in points) else (_nothing(axes),)),
        _text(_LEFT + axes.width / 2, _HEIGHT - 14, "learning rate", anchor="middle"),
        f'<g transform="translate(20 {_TOP + axes.height / 2}) rotate(-90)">{_text(0, 0, "loss", anchor="middle")}</g>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


class _Axes:
    """Where things are: learning rates by their logarithm; losses so that the fall is seen, whatever comes after it."""

    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def __init__(self, points: Sequence[Point]) -> None:
        self.first, self.last = math.log10(points[0].lr), math.log10(points[-1].lr)
        if self.last <= self.first:
            self.last = self.first + 1
        known = [_held(point.smoothed) for point in points if point.smoothed is not None] or [0.0]
        lowest = known.index(min(known))
        single = [_held(point.loss) for point in points[: lowest + 1] if math.isfinite(point.loss)]
        self.low = min([known[lowest], *single])
        self.high = max(known[: lowest + 1])
        if self.high <= self.low:  # it never falls
            self.high = max(known)
        spread = next((each for each in (self.high - self.low, abs(self.low)) if each > _NEAR), 1.0)
        self.low, self.high = self.low - 0.12 * spread, self.high + 0.25 * spread

    def x(self, lr: float) -> float:
        return _LEFT + self.width * (math.log10(lr) - self.first) / (self.last - self.first)

    def y(self, loss: float) -> float:
        place = _TOP + self.height * (self.high - loss) / (self.high - self.low)
        return max(-_HEIGHT, min(2.0 * _HEIGHT, place))  # what is far beyond is cut off anyway

    def decades(self) -> list[float]:
        powers = range(math.ceil(self.first - 1e-9), math.floor(self.last + 1e-9) + 1)
        return [10.0**power for power in powers[:: -(-len(powers) // _DECADES) or 1]]

    def losses(self) -> list[float]:
        rough = (self.high - self.low) / _LINES
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(nice * power for nice in _NICE if nice * power >= rough * (1 - 1e-9))
        return [number * step for number in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


def _held(loss: float) -> float:
    return max(-_FAR, min(_FAR, loss))


def _grid(axes: _Axes) -> Iterator[str]:
    bottom, right = _TOP + axes.height, _LEFT + axes.width
    for lr in axes.decades():
        x = axes.x(lr)
        yield f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom}" stroke="{_GRID}"/>'
        yield _text(x, bottom + 20, f"{lr:g}", anchor="middle")
    for loss in axes.losses():
        y = axes.y(loss)
        yield f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="{_GRID}"/>'
        yield _text(_LEFT - 8, y + 4, f"{loss:.4g}", anchor="end")
    yield f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="{_INK}"/>'


def _dot(axes: _Axes, point: Point) -> str:
    return f'<circle cx="{axes.x(point.lr):.1f}" cy="{axes.y(point.loss):.1f}" r="2" fill="{_GREY}"/>'


def _line(axes: _Axes, points: Sequence[Point]) -> str:
    known = ((axes.x(each.lr), axes.y(each.smoothed)) for each in points if each.smoothed is not None)
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in known)
    return f'<polyline points="{path}" fill="none" stroke="{_CURVE}" stroke-width="2.5" stroke-linejoin="round"/>'


def _nothing(axes: _Axes) -> str:
    return _text(_LEFT + axes.width / 2, _TOP + axes.height / 2, "no finite loss", anchor="middle", size=16)


def _marks(axes: _Axes, suggestion: Suggestion) -> Iterator[str]:
    """Rates as lines, and what they are above the plot, side by side, as lines may be close."""
    named = (
        ("suggested", suggestion.lr, _CHOSEN, ""),
        ("falls from", suggestion.begins, _OTHER, "3 3"),
        ("lowest at", suggestion.minimum, _GREY, "6 4"),
        ("a tenth of that", suggestion.minimum / 10, _GREY, "2 4"),
    )
    for place, (name, lr, colour, dashes) in enumerate(named):
        left, x = _LEFT + place * axes.width / len(named), axes.x(lr)
        look = f'stroke="{colour}" stroke-width="2"' + (f' stroke-dasharray="{dashes}"' if dashes else "")
        yield f'<line x1="{left:.1f}" y1="{_TOP - 20}" x2="{left + 26:.1f}" y2="{_TOP - 20}" {look}/>'
        yield _text(left + 34, _TOP - 16, f"{name} {lr:.2g}")
        if _LEFT <= x <= _LEFT + axes.width:
            yield f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{_TOP + axes.height}" {look}/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 13, weight: int = 400) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" '
        f'fill="{_INK}">{escape(text)}</text>'
    )
