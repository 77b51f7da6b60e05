from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from framework.callbacks import EarlyStopping
from framework.errors import ConfigError
from framework.types import EvalInfo


def report(value: float) -> EvalInfo:
    return EvalInfo("val", 1, 0, {"val/loss": value, "val/accuracy": 0.5})


def stops_at(callback: EarlyStopping, values: Sequence[float]) -> int | None:
    """The index of the first evaluation that is answered with Stop."""
    answers = (callback.on_validation_end(report(value)) for value in values)
    return next((index for index, answer in enumerate(answers) if answer is not None), None)


LOSS: dict[str, Any] = {"monitor": "val/loss"}


@pytest.mark.parametrize(
    ("keywords", "values", "stopped"),
    [
        ({"patience": 2}, [1.0, 1.1, 0.9, 0.9, 0.95, 0.1], 4),
        ({"patience": 0}, [1.0, 0.5, 0.6], 2),
        ({"patience": 2, "mode": "max"}, [0.1, 0.2, 0.3, 0.2, 0.1], 4),
        ({"patience": 9}, [1.0] * 9, None),
        ({"patience": 1, "min_delta": 0.5}, [2.0, 1.5], 1),
        ({"patience": 1, "min_delta": 0.5}, [2.0, 1.4], None),
        ({"patience": 1, "min_delta": 0.5, "mode": "max"}, [1.0, 1.5], 1),
        ({"patience": 1, "min_delta": 0.5, "mode": "max"}, [1.0, 1.6], None),
        ({}, [1.0, math.nan], 1),
        ({}, [1.0, -math.inf], 1),
        ({"check_finite": False}, [1.0, math.nan, math.inf], None),
        ({"stopping_threshold": 0.5}, [1.0, 0.5, 0.4], 2),
        ({"divergence_threshold": 2.0}, [1.0, 2.0, 2.1], 2),
        ({"mode": "max", "stopping_threshold": 0.9}, [0.8, 0.9, 0.91], 2),
        ({"mode": "max", "divergence_threshold": 0.1}, [0.8, 0.1, 0.09], 2),
    ],
)
def test_the_evaluation_it_stops_at(keywords: dict[str, Any], values: list[float], stopped: int | None) -> None:
    assert stops_at(EarlyStopping(**LOSS, **keywords), values) == stopped


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"mode": "least"}, "Use one of: min, max"),
        ({"patience": -1}, "patience=-1"),
        ({"min_delta": -0.1}, "min_delta"),
    ],
)
def test_wrong_settings_are_refused(keywords: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EarlyStopping("val/loss", **keywords)
