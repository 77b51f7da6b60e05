from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.callbacks import EarlyStopping
from framework.checkpoint import check_plain
from framework.errors import ConfigError
from framework.types import EvalReport, Stop


def report(value: float, *, name: str = "val/loss", step: int = 1) -> EvalReport:
    return EvalReport("val", step, 0, {name: value, "val/accuracy": 0.5})


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
        *(({}, [1.0, value], 1) for value in (math.nan, math.inf, -math.inf)),
        *(({"check_finite": False}, [1.0, value], None) for value in (math.nan, math.inf, -math.inf)),
        ({"stopping_threshold": 0.5}, [1.0, 0.5, 0.4], 2),
        ({"divergence_threshold": 2.0}, [1.0, 2.0, 2.1], 2),
        ({"mode": "max", "stopping_threshold": 0.9}, [0.8, 0.9, 0.91], 2),
        ({"mode": "max", "divergence_threshold": 0.1}, [0.8, 0.1, 0.09], 2),
    ],
)
def test_the_evaluation_it_stops_at(keywords: dict[str, Any], values: list[float], stopped: int | None) -> None:
    assert stops_at(EarlyStopping(**LOSS, **keywords), values) == stopped


def test_the_reason_has_metric_patience_and_best() -> None:
    callback = EarlyStopping("val/loss", patience=1)
    assert callback.on_validation_end(report(0.25)) is None
    stop = callback.on_validation_end(report(0.5, step=70))
    assert isinstance(stop, Stop)
    for fact in ("EarlyStopping: val/loss", "in 1 evaluations", "0.25", "step 70"):
        assert fact in stop.reason


def test_an_unknown_monitor_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"monitor=val/los .*\n.*val/loss, val/accuracy\. Did you mean val/loss\?"):
        EarlyStopping("val/los").on_validation_end(report(1.0))


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


@given(
    values=st.lists(st.sampled_from([0.0, 0.1, 0.2, 0.3]), max_size=12),
    cut=st.integers(0, 12),
    mode=st.sampled_from(["min", "max"]),
)
def test_a_resumed_run_stops_where_the_whole_one_does(values: list[float], cut: int, mode: str) -> None:
    def new() -> EarlyStopping:
        return EarlyStopping("val/loss", mode=mode, patience=2)

    whole = stops_at(new(), values)
    first, second = new(), new()
    stopped = stops_at(first, values[:cut])
    if stopped is None:
        check_plain(first.state_dict())
        second.load_state_dict(first.state_dict())
        rest = stops_at(second, values[cut:])
        stopped = None if rest is None else cut + rest
    assert stopped == whole
