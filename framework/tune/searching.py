"""The largest batch that fits, looked for with few tries. No torch."""

from __future__ import annotations

from collections.abc import Callable

_GRAINS = 16


def grain(size: int) -> int:
    """How finely sizes near `size` are told apart: a sixteenth of the power of two at or below it, 1 below 32."""
    return max(1, (1 << (size.bit_length() - 1)) // _GRAINS)


def largest_fitting(fits: Callable[[int], bool], *, start: int, most: int, from_below: bool = False) -> int | None:
    """The largest size of 1 to `most` for which `fits`, to within a `grain`; None where 1 doesn't.

    Doubles from `start`, or halves where that is too much already; then what lies between a size that fits and one that
    doesn't is halved. from_below: begins with 2 or 3 and comes by `start` on its way. Never asks for the same size
    twice, nor, after the first, for more than 2.5 times the largest that fits. Every rank must call it with the same
    numbers, and `fits` must answer the same on all.
    """
    start = min(start, most)
    halvings = max(0, start.bit_length() - 2) if from_below else 0
    size = start >> halvings
    fitting, failing = 0, most + 1
    if fits(size):
        fitting = size
        while fitting < most:
            halvings -= 1
            size = start >> halvings if halvings >= 0 else min(2 * fitting, most)
            if not fits(size):
                failing = size
                break
            fitting = size
    else:
        failing = size
        while failing > 1:
            size = failing // 2
            if fits(size):
                fitting = size
                break
            failing = size
    if fitting == 0:
        return None
    step = grain(fitting)
    while failing - fitting > step:
        middle = (fitting + failing) // 2 // step * step
        middle = middle if middle > fitting else middle + step
        if fits(middle):
            fitting = middle
        else:
            failing = middle
    return fitting
