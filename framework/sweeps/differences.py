"""Which rows can be told apart from the best one: paired tests of all rows, as the best was chosen by the same numbers.

1. *Paired*: two rows are compared by their differences in the blocks that both have, such as seeds. What a block does
   to all rows cancels out.
2. *Moderated*: five seeds say little of a variance, so that of each pair is drawn towards what the pairs have in
   common, the more the less they differ. Rows with the same noise are tested with about the degrees of freedom of all
   rows together; a row that is noisier than the others keeps its own variance. This is the empirical Bayes method of
   limma: Smyth (2004), https://doi.org/10.2202/1544-6115.1027.
3. *Corrected for the choice*: being the best of 8 rows, a row stands out by luck. As any two rows could have been the
   best and the other one, Holm's step-down method counts all pairs of the rows that aren't told apart yet: 28, 21, 15…

With 8 equal rows and 5 seeds, the best is told apart from any other in 3 % of tables, also if one of them is ten times
as noisy as the others (then with 2 seeds: in 13 %). A row that is better than 7 others by two standard deviations is
told apart from half of them, by three from nearly all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from framework.sweeps.student_t import two_sided_p

LEVEL = 0.05
"""How often the best of equal rows may be told apart from another one."""

Block = tuple[str, ...]
"""The overrides of the keys of `sweep.over`, such as `("seed=3",)`."""
Scores = Mapping[Block, float]
"""The scores of one row."""

# From here on, the asymptotic series of the digamma and the trigamma function are exact to 12 digits.
_ASYMPTOTIC = 10.0
_HALVINGS = 60
_MAX_EXPONENT = 709.0


@dataclass(frozen=True)
class _Difference:
    """The differences of two rows, over the blocks that both have."""

    mean: float
    variance: float
    num_blocks: int

    @property
    def df(self) -> int:
        """Return the degrees of freedom of the variance."""
        return self.num_blocks - 1


@dataclass(frozen=True)
class _Prior:
    """What the variances of all pairs have in common: the variance that each is drawn to, and its weight."""

    variance: float
    # Infinite: the pairs differ no more than by chance.
    df: float


def told_apart(rows: Sequence[Scores], *, best: int) -> dict[int, bool]:
    """Return for each row that can be compared with the best one if it is told apart from it, by the row's index.

    Two rows can be compared if they have two blocks in common and differ in more than a constant.

    Args:
        rows: their scores, all of them finite.
        best: the index of the row whose mean is best.
    """
    differences: dict[tuple[int, int], _Difference] = {}
    for one, other in combinations(range(len(rows)), 2):
        difference = _difference(rows[one], rows[other])
        if difference is not None:
            differences[one, other] = difference
    prior = _prior(list(differences.values()))
    max_df = _df_of_all(rows)

    p_values: dict[int, float] = {}
    for (one, other), difference in differences.items():
        if best not in (one, other):
            continue
        row = other if one == best else one
        p = _p_value(difference, prior, max_df=max_df)
        if p is not None:
            p_values[row] = p
    return _step_down(p_values)


def _difference(one: Scores, other: Scores) -> _Difference | None:
    """Return the difference of two rows; None if they have fewer than two blocks in common."""
    values = [one[block] - other[block] for block in one if block in other]
    if len(values) < 2:
        return None
    mean = sum(values) / len(values)
    squares = [(value - mean) * (value - mean) for value in values]
    return _Difference(mean, sum(squares) / (len(values) - 1), len(values))


def _df_of_all(rows: Sequence[Scores]) -> int:
    """Return the degrees of freedom of what is left of all scores without the effects of rows and blocks."""
    blocks: set[Block] = set()
    for row in rows:
        blocks.update(row)
    return sum(map(len, rows)) - len(rows) - len(blocks) + 1


def _p_value(difference: _Difference, prior: _Prior | None, *, max_df: int) -> float | None:
    """Return the p-value of a difference, with its variance moderated; None if there is no variance to test with."""
    variance = difference.variance
    df = float(difference.df)
    if prior is not None:
        weight = prior.df / (prior.df + df) if math.isfinite(prior.df) else 1.0
        variance = weight * prior.variance + (1.0 - weight) * variance
        # Pairs have rows in common: together they don't know more than all scores do.
        df = max(df, min(df + prior.df, max_df))
    if not math.isfinite(variance) or variance <= 0:
        return None
    return two_sided_p(difference.mean / math.sqrt(variance / difference.num_blocks), df=df)


def _step_down(p_values: Mapping[int, float]) -> dict[int, bool]:
    """Return which rows are told apart from the best one.

    The best row and j are compared at the level divided by the number of pairs of rows that are left when j's turn
    comes, the smallest p-value first. The first row that isn't told apart ends it.
    """
    verdicts = dict.fromkeys(p_values, False)
    # With the best one.
    num_left = len(p_values) + 1
    for row, p in sorted(p_values.items(), key=lambda item: item[1]):
        if p > LEVEL / math.comb(num_left, 2):
            break
        verdicts[row] = True
        num_left -= 1
    return verdicts


# The moderated variance: section 6.2 of Smyth (2004)


def _prior(differences: Sequence[_Difference]) -> _Prior | None:
    """Estimate what the variances have in common; None for fewer than two of them."""
    logs = []
    expected_spread = []
    for difference in differences:
        if math.isfinite(difference.variance) and difference.variance > 0:
            half_df = difference.df / 2
            logs.append(math.log(difference.variance) - _digamma(half_df) + math.log(half_df))
            expected_spread.append(_trigamma(half_df))
    if len(logs) < 2:
        return None

    mean = sum(logs) / len(logs)
    spread = sum((value - mean) ** 2 for value in logs) / (len(logs) - 1)
    excess = spread - sum(expected_spread) / len(logs)
    if excess <= 0:
        return _Prior(_exp(mean), df=math.inf)
    half_df = _inverse_trigamma(excess)
    return _Prior(_exp(mean + _digamma(half_df) - math.log(half_df)), df=2 * half_df)


def _exp(x: float) -> float:
    """Return `math.exp(x)`, or the largest power of e that is a float."""
    return math.exp(min(x, _MAX_EXPONENT))


def _digamma(x: float) -> float:
    """Return the derivative of the logarithm of the gamma function: https://dlmf.nist.gov/5.11.E2."""
    shift = 0.0
    while x < _ASYMPTOTIC:
        shift -= 1.0 / x
        x += 1.0
    square = 1.0 / (x * x)
    series = square * (1 / 12 - square * (1 / 120 - square * (1 / 252 - square * (1 / 240 - square / 132))))
    return shift + math.log(x) - 0.5 / x - series


def _trigamma(x: float) -> float:
    """Return the derivative of `_digamma`: https://dlmf.nist.gov/5.15.E8."""
    shift = 0.0
    while x < _ASYMPTOTIC:
        shift += 1.0 / (x * x)
        x += 1.0
    square = 1.0 / (x * x)
    series = square * (1 / 6 - square * (1 / 30 - square * (1 / 42 - square * (1 / 30 - square * 5 / 66))))
    return shift + (1.0 + 0.5 / x + series) / x


def _inverse_trigamma(value: float) -> float:
    """Return the x at which `_trigamma` has this value, above 0. It lies between 1/value and 1 + 1/value."""
    low = 1.0 / value
    high = low + 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _trigamma(middle) > value:
            low = middle
        else:
            high = middle
    return high
