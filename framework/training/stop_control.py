"""Ending training before its limits, for a callback or a signal: all ranks stop after the same step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

from framework.config.schema import TrainerConfig
from framework.distributed.collectives import any_over_ranks, gather_to_all
from framework.distributed.context import Context
from framework.errors import TargetError
from framework.launch.plan import MonitorLink
from framework.launch.stopping import STEPS_TO_STOP, StopRequest
from framework.strategies.base import Strategy
from framework.types import Stop, described_hook


@final
class StopControl:
    """Collect the reasons for this rank to stop, and agree with the other ranks."""

    def __init__(self, link: MonitorLink, *, context: Context) -> None:
        # Of a callback, once the ranks have agreed.
        self.reason: str | None = None
        # Of a callback of this rank, before that.
        self.own_reason: str | None = None
        # What requested it, such as "SIGTERM".
        self.stopped_by: str | None = None
        # Training had ended by then, and the test had not.
        self.stopped_test = False
        self._context = context
        self.request = StopRequest(link, world_size=context.world_size)

    @property
    def should_stop(self) -> bool:
        """True if no further step follows."""
        return self.reason is not None or self.stopped_by is not None

    @property
    def on_request(self) -> bool:
        """True if the run was stopped on request before its own end, so it can be resumed."""
        return self.stopped_test or (self.stopped_by is not None and self.reason is None)

    def handle(self, answer: Stop | None, hook: Callable[..., Any]) -> None:
        """Note what a hook returned. Raises TargetError unless that is None or a Stop."""
        if answer is None:
            return
        if not isinstance(answer, Stop):
            raise TargetError(
                f"{described_hook(hook)} returned {answer!r}. Return framework.Stop(reason) to end, "
                "framework.Log(values) to log something, else None."
            )
        self.own_reason = answer.reason
        if self._context.world_size == 1:
            self.reason = answer.reason

    def agree(self, any_reason: bool | None = None) -> None:
        """Stop if a callback on any rank asks for it. Every rank must call it.

        any_reason: True if any rank has a reason, if that is known already.
        """
        if any_reason is None:
            any_reason = any_over_ranks(self.own_reason is not None, self._context)
        if any_reason:
            reasons = gather_to_all(self.own_reason, self._context)
            self.reason = next(reason for reason in reasons if reason is not None)

    def stop_if_due(self, step: int, *, steps_ahead: int) -> None:
        """Stop if all ranks do so after this step. Wait for this rank's devices first. See `StopRequest.due`."""
        if self.request.due(step, steps_ahead=steps_ahead):
            self.stopped_by = self.request.signal_name

    def note_stopped_test(self) -> None:
        """Note that the final test was left on request."""
        self.stopped_test = True
        self.stopped_by = self.request.signal_name

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what checkpoints keep: `reason`, and each rank's own as `wishes`."""
        self.reason = state["reason"]
        self.own_reason = next((reason for reason in state["wishes"] if reason is not None), None)


def steps_to_meeting(strategy: Strategy, settings: TrainerConfig, *, step: int) -> int:
    """Return after how many more steps than `step` every rank will have waited for every other."""
    to_exchange = strategy.steps_to_exchange
    if to_exchange is None:
        return STEPS_TO_STOP
    steps_to_log = settings.log_every_n_steps - step % settings.log_every_n_steps
    return min(to_exchange, steps_to_log)
