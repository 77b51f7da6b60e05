"""How training ends before its limits: a callback wishes it, or somebody asks for it; all ranks after the same step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from framework.distributed.collectives import any_over_ranks, gather_to_all
from framework.distributed.context import Context
from framework.errors import TargetError
from framework.launch.link import Link
from framework.launch.stopping import STEPS_TO_COME, StopRequest
from framework.types import Stop


@final
class Ending:
    """reason: of a callback, once the ranks have agreed. stopped_by: what asked for it, such as "SIGTERM".

    wish: of a callback of this rank, which the ranks have yet to agree on.
    """

    def __init__(self, link: Link, *, context: Context) -> None:
        self.reason: str | None = None
        self.stopped_by: str | None = None
        self.wish: str | None = None
        self._context = context
        self._request = StopRequest(link, world_size=context.world_size)

    @property
    def has_come(self) -> bool:
        """Whether no further step is to be made."""
        return self.reason is not None or self.stopped_by is not None

    @property
    def was_stopped(self) -> bool:
        """Whether training has yet to go on: it was stopped on request, before it came to its own end."""
        return self.stopped_by is not None and self.reason is None

    @property
    def is_asked_for(self) -> bool:
        """Whether this rank knows of a request to stop. One read of memory."""
        return self._request.pending

    def heed(self, answer: Stop | None) -> None:
        """Take in what a callback answered. Raises TargetError where that is neither nothing nor a Stop."""
        if answer is not None:
            if not isinstance(answer, Stop):
                raise TargetError(
                    f"A callback answered {answer!r}. Answer framework.Stop(reason) to end, else nothing."
                )
            self.wish = answer.reason
            # Alone there is nobody to agree with.
            if self._context.world_size == 1:
                self.reason = answer.reason

    def agree(self, wished: bool | None = None) -> None:
        """End where a rank wishes it. Every rank must call it; wished: whether any does, None asks them all."""
        if any_over_ranks(self.wish is not None, self._context) if wished is None else wished:
            reasons = gather_to_all(self.wish, self._context)
            self.reason = next(reason for reason in reasons if reason is not None)

    def heed_request(self, step: int, *, meets_in: int = STEPS_TO_COME) -> None:
        """Stop where all ranks do so after this step, for which this rank's devices have been waited.

        meets_in: see `StopRequest.due`.
        """
        if self._request.due(step, meets_in=meets_in):
            self.stopped_by = self._request.came_by

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """reason: as above; wishes: of the ranks there were, each None or a wish."""
        self.reason = state["reason"]
        self.wish = next((wish for wish in state["wishes"] if wish is not None), None)
