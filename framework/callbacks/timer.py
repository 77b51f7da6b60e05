"""Ends training when its time is used up."""

from __future__ import annotations

from datetime import timedelta
from time import monotonic
from typing import Any, final

from framework.errors import ConfigError
from framework.types import Callback, FitInfo, StepInfo, Stop


@final
class Timer(Callback):
    """Stop after the first step that ends `duration` seconds or more after the start, as Lightning's Timer.

    Time used before a resume counts too: it is in the checkpoint.
    """

    # Each rank has its own clock.
    state_is_rank_zero = True

    def __init__(self, duration: float) -> None:
        if not duration > 0:
            raise ConfigError(f"Timer: duration={duration} is not above 0. Give the seconds training may take.")
        self._duration_s = duration
        self._used_before_s = 0.0
        self._started_s: float | None = None

    def on_fit_start(self, info: FitInfo) -> None:
        self._started_s = monotonic()

    def on_train_step_end(self, info: StepInfo) -> Stop | None:
        if self._used_s() < self._duration_s:
            return None
        duration = timedelta(seconds=self._duration_s)
        return Stop(f"Timer: the {duration} for training are used up at step {info.step}.")

    def state_dict(self) -> dict[str, Any]:
        return {"used_s": self._used_s()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._used_before_s = state["used_s"]

    def _used_s(self) -> float:
        if self._started_s is None:
            return self._used_before_s
        return self._used_before_s + monotonic() - self._started_s
