"""Student's t distribution against values of scipy.stats.t (`2 * sf(t, df)` and `ppf(1 - p / 2, df)`)."""

from __future__ import annotations

import math

import pytest

from tests.helpers.internals import two_sided_p, two_sided_quantile


@pytest.mark.parametrize(
    ("t", "df", "p"),
    [
        (0.0, 4, 1.0),
        (1e-9, 3, 0.9999999992648948),
        (0.5, 1, 0.7048327646991335),
        (12.7, 1, 0.050024327689344165),
        (2.0, 4, 0.11611652351681556),
        (5.0, 6.4, 0.0020347984353316275),
        (40.0, 28, 2.985721407534345e-26),
        (1.96, 1e6, 0.04999606758526985),
    ],
)
def test_p_values_are_those_of_scipy(t: float, df: float, p: float) -> None:
    assert two_sided_p(t, df=df) == pytest.approx(p, rel=1e-8)
    assert two_sided_p(-t, df=df) == two_sided_p(t, df=df)


@pytest.mark.parametrize(
    ("p", "df", "t"),
    [
        (0.05, 1, 12.706204736174694),
        (0.05, 4, 2.7764451051977934),
        (0.05, 28, 2.0484071417952454),
        (0.01, 6.4, 3.6141337546881074),
        (0.05, 1e6, 1.959966356814107),
    ],
)
def test_quantiles_are_those_of_scipy(p: float, df: float, t: float) -> None:
    assert two_sided_quantile(p, df=df) == pytest.approx(t, rel=1e-8)


def test_a_huge_t_has_no_chance() -> None:
    assert two_sided_p(1e200, df=4) == 0.0
    assert two_sided_p(math.inf, df=4) == 0.0
