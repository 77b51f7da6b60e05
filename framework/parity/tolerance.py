"""How far two trainings may be apart and be the same but for rounding.

A sum in another order is off by a few units of rounding of what is added, which is far less than any mistake makes but
can't be told beforehand: it grows with the sums' lengths and the model's depth, and an optimizer or a ReLU near zero
makes more of it. So it is measured: the same training of one process is run again with each weight moved by `moved_by`,
and what that changes in a number, times FACTOR, is allowed on top of the floor. It is the most it has changed so far,
and at least what it changes in the median of all that is compared with it: it is but one draw, and may be a lucky one.

All differences are norms of a tensor's difference over the norm of the tensor; of what a module gives, the sample that
is farthest off over the root mean square of all samples. Norms, since a value that is nearly zero has rounding as large
as itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

FACTOR = 4.0
"""What is allowed is so many times what the moved weights changed: two samples of one distribution differ by less."""

_FLOOR = 2.0**7
_SHORT_FLOOR = 2.0**2
_MOVED = 2.0**6
_SHORT_MOVED = 1.0
_SHORT_UNIT = 2.0**-16  # formats with a rounding larger than this are short ones
_AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def unit_of(precision: str, dtypes: Sequence[torch.dtype]) -> float:
    """The greatest relative error of one rounding: 2^-53 for float64, 2^-24 float32, 2^-11 float16, 2^-8 bfloat16.

    Of the coarsest format: of weights of these types, or of what `trainer.precision` computes in.
    """
    formats = [dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
    formats += [_AUTOCAST[precision]] if precision in _AUTOCAST else []
    return max((torch.finfo(dtype).eps / 2 for dtype in formats), default=2.0**-24)


def floor(unit: float) -> float:
    """What is always allowed: 128 units, 4 of a short format (7.6e-6 in float32, 0.2 % in float16, 1.6 % in bfloat16).

    Measured rounding may happen to be smaller than it is another time. Sums of many numbers are off by about the root
    of how many they are, in units; in a short format they are added in float32, so 4 units are many.
    """
    return unit * (_SHORT_FLOOR if unit > _SHORT_UNIT else _FLOOR)


def moved_by(unit: float) -> float:
    """How much the weights are moved: 64 units, 1 of a short format.

    More than rounding does, so that what is rare (a ReLU that turns over, a sign of a gradient that is nearly zero)
    happens there sooner than in the comparison.
    """
    return unit * (_SHORT_MOVED if unit > _SHORT_UNIT else _MOVED)


def shown_gradient(unit: float) -> float:
    """The share of a gradient's root mean square below which a value's sign isn't sure: its change isn't looked at."""
    return 2.0**-3 if unit > _SHORT_UNIT else 2.0**-6


def of_gradients(unit: float) -> float:
    """Changes of weights may be off by so many times what their gradients may: 8, or 2.8 in a short format.

    An optimizer that divides by a gradient's size, as Adam does, makes a small value's error, which is that of the
    whole tensor, as large as its change: 1/s of it at the smallest share s that is looked at, and in the mean square
    of values that are distributed as noise about the root of that.
    """
    return float(shown_gradient(unit) ** -0.5)
