"""Student's t distribution. Its degrees of freedom needn't be whole: an estimated variance may have 6.4 of them."""

from __future__ import annotations

import math
from functools import lru_cache

# Both are far more than is needed: the fraction converges in about ten terms, and a double has 53 bits.
_MAX_TERMS = 1000
_HALVINGS = 100
_EPSILON = 1e-15
# In place of a zero in a denominator.
_TINY = 1e-300


def two_sided_p(t: float, *, df: float) -> float:
    """Return the probability that |T| is at least |t|. df: degrees of freedom, above 0."""
    square = t * t
    if math.isinf(square):
        return 0.0
    return _regularized_beta(df / (df + square), complement=square / (df + square), a=df / 2, b=0.5)


@lru_cache(maxsize=256)
def two_sided_quantile(p: float, *, df: float) -> float:
    """Return the t for which `two_sided_p` is p: 2.776 for p=0.05, df=4."""
    low = 0.0
    high = 1.0
    while two_sided_p(high, df=df) > p:
        high *= 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if two_sided_p(middle, df=df) > p:
            low = middle
        else:
            high = middle
    return high


def _regularized_beta(x: float, *, complement: float, a: float, b: float) -> float:
    """Return the regularized incomplete beta function I_x(a, b): https://dlmf.nist.gov/8.17.

    complement: 1 - x, which may be too small to be seen in x.
    """
    # The fraction converges fast only for small x. https://dlmf.nist.gov/8.17.E4
    if x > (a + 1) / (a + b + 2):
        return 1.0 - _regularized_beta(complement, complement=x, a=b, b=a)
    if x <= 0:
        return 0.0
    log_beta = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    factor = math.exp(a * math.log(x) + b * math.log1p(-x) - log_beta) / a
    return factor * _beta_fraction(x, a=a, b=b)


def _beta_fraction(x: float, *, a: float, b: float) -> float:
    """Return the continued fraction of https://dlmf.nist.gov/8.17.E22, by Lentz's method (https://dlmf.nist.gov/3.10)."""
    result = 1.0
    numerator = 1.0
    denominator = 0.0
    for term in range(_MAX_TERMS):
        coefficient = _beta_coefficient(term, x, a=a, b=b)
        denominator = 1.0 / _not_zero(1.0 + coefficient * denominator)
        numerator = _not_zero(1.0 + coefficient / numerator)
        change = numerator * denominator
        result *= change
        if abs(change - 1.0) < _EPSILON:
            break
    return 1.0 / result


def _beta_coefficient(term: int, x: float, *, a: float, b: float) -> float:
    """Return the numerator of a term: of d_1 for 0, d_2 for 1, …"""
    m = (term + 1) // 2
    if term % 2 == 1:
        return m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
    return -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))


def _not_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
