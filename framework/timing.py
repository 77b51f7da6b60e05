"""Times of the ranks, compared while they train: this rank's stopwatch, and what all of them say."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from typing import final

from torch import nn

from framework.distributed.collectives import gather_to_all
from framework.distributed.context import Context
from framework.progress import hooks
from framework.pulse import Pulse
from framework.rank_log import warn
from framework.slow_ranks import SlowRank, SlowRanks
from framework.stopwatch import Clock, Stopwatch, clock_of
from framework.types import Logger, Strategy


@final
class Timing:
    """watch: to be marked in every step. every: steps from one log to the next. clock: of the device by default."""

    def __init__(self, pulse: Pulse, *, context: Context, every: int, clock: Clock | None = None) -> None:
        self.watch = Stopwatch(pulse, clock=clock_of(context.device) if clock is None else clock, every=every)
        self._context = context
        self._slow_ranks = SlowRanks(rank=context.rank, world_size=context.world_size)

    def start(self, strategy: Strategy, model: nn.Module, *, step: int) -> None:
        """Training starts, `step` steps being done. model: as wrapped. Every rank must call it."""
        context = self._context
        if context.world_size > 1:
            devices = ", ".join(dict.fromkeys(map(str, context.devices)))
            self._slow_ranks.start(gather_to_all(f"{socket.gethostname()}, {devices}", context), step=step)
            for tell in hooks([strategy], "tell_waiting"):
                self.watch.knows_waiting = tell(model, self.watch)
        self.watch.start()

    def row(self) -> list[float]:
        """The times since the last log, to be added up over ranks, for `note`."""
        return self._slow_ranks.row(self.watch.read())

    def note(self, times: Sequence[float], *, step: int, loggers: Iterable[Logger]) -> dict[str, float]:
        """Of the times of all ranks: what to log; a rank that turns out to be slow is told. Empty but on rank 0."""
        if not self._context.is_main:
            return {}
        values = self._slow_ranks.note(times, step=step)
        if self._slow_ranks.news is not None:
            warn(self._slow_ranks.news)
            for logger in loggers:
                logger.text("slow_rank", self._slow_ranks.news)
        return values

    def slow_ranks(self) -> list[SlowRank]:
        """Who is to be named now, the worst first; on rank 0."""
        return self._slow_ranks.found()
