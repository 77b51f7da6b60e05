"""A limit of training time, which a resume doesn't reset."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from framework.callbacks import Timer
from framework.errors import ConfigError
from framework.types import FitInfo, StepInfo, Stop
from tests.helpers.internals import check_plain, timer_module

# The callback doesn't look at it.
OPTIMIZER: Any = None
INFO = FitInfo(nn.Identity(), 0, total_steps=None, steps_per_epoch=10, max_epochs=None, optimizer=OPTIMIZER)
REPORT = StepInfo(7, 0, torch.zeros(()), 1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now_s=1000.0)
    monkeypatch.setattr(timer_module, "monotonic", lambda: clock.now_s)
    return clock


def test_it_stops_when_the_time_is_used_up(clock: SimpleNamespace) -> None:
    callback = Timer(duration=90)
    callback.on_fit_start(INFO)
    clock.now_s += 89.9
    assert callback.on_train_step_end(REPORT) is None
    clock.now_s += 0.2
    stop = callback.on_train_step_end(REPORT)
    assert isinstance(stop, Stop)
    assert "0:01:30" in stop.reason
    assert "step 7" in stop.reason


def test_a_resumed_run_has_the_remaining_time(clock: SimpleNamespace) -> None:
    first = Timer(duration=90)
    first.on_fit_start(INFO)
    clock.now_s += 60
    state = first.state_dict()
    check_plain(state)
    # The time between the two runs doesn't count.
    clock.now_s += 10_000
    second = Timer(duration=90)
    second.load_state_dict(state)
    assert second.state_dict() == state
    second.on_fit_start(INFO)
    clock.now_s += 29
    assert second.on_train_step_end(REPORT) is None
    clock.now_s += 1
    assert second.on_train_step_end(REPORT) is not None


@pytest.mark.parametrize("duration", [0, -1, float("nan")])
def test_a_duration_is_above_zero(duration: float) -> None:
    with pytest.raises(ConfigError, match="duration="):
        Timer(duration=duration)
