"""Ends training when a validation metric no longer improves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final, get_args

from framework.config.schema import Mode
from framework.errors import ConfigError
from framework.types import Callback, EvalInfo, Stop


@final
@dataclass(eq=False)
class EarlyStopping(Callback):
    """Stop after `patience` evaluations in a row without an improvement of `monitor`, as Lightning's EarlyStopping."""

    monitor: str
    # min or max, whichever is better.
    mode: str = "min"
    # Evaluations without an improvement.
    patience: int = 3
    # A change up to this is no improvement.
    min_delta: float = 0.0
    # Stop at once if the metric is NaN or infinite.
    check_finite: bool = True
    # Stop once the metric is better than this.
    stopping_threshold: float | None = None
    # Stop once the metric is worse than this.
    divergence_threshold: float | None = None

    def __post_init__(self) -> None:
        modes = get_args(Mode)
        if self.mode not in modes:
            raise ConfigError(f"EarlyStopping: mode={self.mode!r} is not known. Use one of: {', '.join(modes)}.")
        for name in ("patience", "min_delta"):
            value = getattr(self, name)
            if value < 0:
                raise ConfigError(f"EarlyStopping: {name}={value} is below 0. Give 0 or more.")
        self._wait_count = 0
        self._best_score = math.inf if self.mode == "min" else -math.inf

    def on_validation_end(self, info: EvalInfo) -> Stop | None:
        reason = self._reason_to_stop(info.metrics[self.monitor])
        if reason is None:
            return None
        return Stop(f"EarlyStopping: {reason} (step {info.step})")

    def state_dict(self) -> dict[str, Any]:
        return {"wait_count": self._wait_count, "best_score": self._best_score}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._wait_count = state["wait_count"]
        self._best_score = state["best_score"]

    def _reason_to_stop(self, score: float) -> str | None:
        """Compare the score with the best one, and return why training should end; None if it shouldn't."""
        metric = f"{self.monitor} = {score:.6g}"
        if self.check_finite and not math.isfinite(score):
            return f"{metric} is not finite; the best was {self._best_score:.6g}"
        if self.stopping_threshold is not None and self._is_better(score, than=self.stopping_threshold):
            return f"{metric} reached stopping_threshold={self.stopping_threshold}"
        if self.divergence_threshold is not None and self._is_better(self.divergence_threshold, than=score):
            return f"{metric} is worse than divergence_threshold={self.divergence_threshold}"

        delta = self.min_delta if self.mode == "min" else -self.min_delta
        if self._is_better(score + delta, than=self._best_score):
            self._best_score = score
            self._wait_count = 0
            return None

        self._wait_count += 1
        if self._wait_count < self.patience:
            return None
        return f"{self.monitor} did not improve in {self._wait_count} evaluations; the best was {self._best_score:.6g}"

    def _is_better(self, score: float, *, than: float) -> bool:
        return score < than if self.mode == "min" else score > than
