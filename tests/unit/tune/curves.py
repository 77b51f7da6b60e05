"""Curves of range tests that are known beforehand."""

from __future__ import annotations

import random
from collections.abc import Callable

from framework.tune.suggesting import Curve

RATES = [1e-7 * 10 ** (8 * number / 99) for number in range(100)]


def loss_at(lr: float, *, floor: float = 0.3, knee: float = 1e-2, edge: float = 0.5) -> float:
    """2.3, falling about `knee` to the floor, and beyond `edge` rising without end."""
    fallen = 1 / (1 + (knee / lr) ** 1.5)
    return 2.3 - (2.3 - floor) * fallen + (lr / edge) ** 3


def curve_of(loss: Callable[[float], float], *, noise: float = 0.0, threshold: float | None = 4.0) -> Curve:
    curve, draw = Curve(threshold=threshold), random.Random(3)
    for lr in RATES:
        if not curve.add(lr, loss(lr) * (1 + noise * draw.gauss(0, 1))):
            break
    return curve
