"""The picture of a range test: well-formed, with everything inside it, whatever the losses were."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from framework.tune.picture import draw
from framework.tune.suggesting import Curve, Point, suggest
from tests.unit.tune.curves import RATES, curve_of, loss_at

SVG = "{http://www.w3.org/2000/svg}"


def drawn(points: Sequence[Point], *, title: str = "mine") -> ElementTree.Element:
    text = draw(points, suggest(points), title=title)
    assert not re.search(r"\bnan\b|\binf\b", text)
    return ElementTree.fromstring(text)


def texts(picture: ElementTree.Element) -> list[str]:
    return [each.text or "" for each in picture.iter(f"{SVG}text")]


def test_the_curve_and_what_is_suggested() -> None:
    curve = curve_of(loss_at, noise=0.02)
    found = suggest(curve.points)
    assert found is not None
    picture = drawn(curve.points, title="a < b & c")
    named = texts(picture)
    assert {"a < b & c", "learning rate", "loss", f"suggested {found.lr:.2g}", "0.001"} <= set(named)
    assert f"a tenth of that {found.minimum / 10:.2g}" in named
    assert len(list(picture.iter(f"{SVG}circle"))) == len(curve.points)
    (line,) = picture.iter(f"{SVG}polyline")
    places = [tuple(map(float, place.split(","))) for place in line.attrib["points"].split()]
    assert len(places) == len(curve.points)
    assert [x for x, _ in places] == sorted(x for x, _ in places)
    for text in picture.iter(f"{SVG}text"):
        assert 0 <= float(text.attrib["x"]) <= 860
        assert 0 <= float(text.attrib["y"]) <= 480


@pytest.mark.parametrize(
    "losses",
    [
        [math.nan],
        [1.0],
        [2.0, 2.0, 2.0],
        [1.0, 2.0, 3.0],
        [0.0, 0.0],
        [1e30, 1.0, 1e-30, 1e-30, math.inf],
        [-3.0, -4.0],
        [1.7e308, -1.7e308, 1.7e308],
        [1.7e308, 0.0],
        [1e-313, 1e-313],
        [1e-317],
        [1e-313, 2e-314],
        [1e300, 1e300 * (1 - 1e-16)],
    ],
    ids=str,
)
def test_any_losses_can_be_drawn(losses: list[float]) -> None:
    curve = Curve(threshold=None)
    for lr, loss in zip(RATES, losses, strict=False):
        curve.add(lr, loss)
    named = texts(drawn(curve.points))
    assert "loss" in named
    assert ("no finite loss" in named) is (not math.isfinite(losses[0]))


def test_a_wide_range_of_rates_has_labels_side_by_side() -> None:
    rates = [1e-30, 1e-12, 1e6]
    picture = drawn([Point(lr, 1.0, 1.0) for lr in rates])
    places = sorted(float(text.attrib["x"]) for text in picture.iter(f"{SVG}text") if "e-" in (text.text or ""))
    assert len(places) > 5
    assert min(after - before for before, after in pairwise(places)) > 50
