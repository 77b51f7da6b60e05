"""What is usual for a number that training repeats, and how far one is above it: a robust z-score. Imports no torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import final

_SIGMAS_PER_MAD = 1.4826
"""Of a normal distribution: the standard deviation over the median absolute deviation."""

_LEAST_SHARE = 4
"""No value is judged before the window has this part of its values."""


@final
class Usual:
    """The last values of a number, of which a few outliers change neither the median nor the deviation.

        usual = Usual(128, values=[1.0, 1.1, 0.9, …])
        usual.score(4.0)                                  # 20.2: standard deviations above the median

    The score of a value is (value - median) / (1.4826 · MAD), where MAD is the median absolute deviation (Iglewicz and
    Hoaglin, "How to detect and handle outliers", 1993). A deviation below 1 % of the median counts as 1 %.

    Args:
        size: values that are kept.
    """

    def __init__(self, size: int, values: Iterable[float] = ()) -> None:
        self._least = max(2, size // _LEAST_SHARE)
        self.values: deque[float] = deque(values, maxlen=size)

    @property
    def middle(self) -> float:
        """The median."""
        return median(self.values)

    def score(self, value: float) -> float:
        """Return by how many standard deviations a value is above the median; 0 if there are too few to judge it."""
        if len(self.values) < self._least:
            return 0.0
        middle = self.middle
        deviation = _SIGMAS_PER_MAD * median(abs(other - middle) for other in self.values)
        smallest = max(0.01 * abs(middle), 1e-12)
        return (value - middle) / max(deviation, smallest)
