"""Several ranks as threads of this process: what is reduced and agreed, without a process group or its seconds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from framework.distributed.context import Context
from framework.topology import Topology

CPU = torch.device("cpu")
_DEADLINE_S = 20.0

Result = TypeVar("Result")


def cpu_context(rank: int = 0, *, world_size: int = 1) -> Context:
    return Context(Topology(1, world_size, 0, 1), rank, rank, 0, (CPU,), "gloo")


class RankLeftError(Exception):
    """Another rank ended without coming to a collective: with real processes this one would wait."""


class SimulatedRanks:
    """The collectives of `world_size` threads. Like the real ones they return once every rank has called."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._changed = threading.Condition()
        self._given: list[list[Any]] = [[] for _ in range(world_size)]
        self._ended = [False] * world_size

    def run(self, call: Callable[[Context], Result]) -> list[Result | Exception]:
        """What `call` gives on every rank, or what it raised there."""
        self._given = [[] for _ in range(self.world_size)]
        self._ended = [False] * self.world_size
        ends: list[Any] = [None] * self.world_size

        def one(rank: int) -> None:
            try:
                ends[rank] = call(cpu_context(rank, world_size=self.world_size))
            except Exception as error:
                ends[rank] = error
            with self._changed:
                self._ended[rank] = True
                self._changed.notify_all()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return ends

    def gather(self, value: Any, context: Context) -> list[Any]:
        with self._changed:
            mine = self._given[context.rank]
            number = len(mine)
            mine.append(value)
            self._changed.notify_all()
            in_time = self._changed.wait_for(lambda: not self._missing(number) or self._left(number), _DEADLINE_S)
            assert in_time, "a rank didn't come to a collective"
            if self._missing(number):
                raise RankLeftError
            return [values[number] for values in self._given]

    def sum(self, values: Tensor, context: Context) -> Tensor:
        return values.copy_(torch.stack(self.gather(values.clone(), context)).sum(dim=0))

    def any(self, flag: bool, context: Context) -> bool:
        return any(self.gather(flag, context))

    def _missing(self, number: int) -> list[int]:
        return [rank for rank, values in enumerate(self._given) if len(values) <= number]

    def _left(self, number: int) -> bool:
        return any(self._ended[rank] for rank in self._missing(number))
