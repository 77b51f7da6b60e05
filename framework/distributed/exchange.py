"""A few numbers of every rank, exchanged beside training: what others have is there when it is needed.

Over a group of its own on the CPU, so that nothing of it meets the exchange of gradients, under any strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, final

import torch
import torch.distributed as dist

from framework.distributed.context import Context
from framework.distributed.group import side_group
from framework.errors import RunError

Table = list[list[float]]
"""Each rank's numbers, in the order of ranks."""


class Exchange(Protocol):
    """What the ranks tell each other. Every rank must make the same calls in the same order."""

    def begin(self, row: Sequence[float]) -> Callable[[], Table]:
        """Send this rank's numbers, as many as any other's; doesn't wait. What is given waits for those of all."""
        ...

    def give(self, value: Any, *, source: int) -> Any:
        """The value that rank `source` has, on every rank. Pickled between our own processes."""
        ...


@final
class Alone:
    """Of one rank."""

    def begin(self, row: Sequence[float]) -> Callable[[], Table]:
        return lambda: [list(row)]

    def give(self, value: Any, *, source: int) -> Any:
        return value


@final
class SideExchange:
    """Over gloo. To be opened inside the process group, by every rank, before it is used; for one rank alone too.

    timeout_s: of an exchange. Raises RunError where ranks don't come within it, RuntimeError where it wasn't opened.
    """

    def __init__(self, context: Context, *, timeout_s: float) -> None:
        self._context = context
        self._timeout_s = timeout_s
        self._group: dist.ProcessGroup | None = None

    def open(self) -> None:
        if self._context.world_size > 1 and self._group is None:
            self._group = side_group(self._timeout_s, is_counted=True)

    @property
    def groups(self) -> Sequence[dist.ProcessGroup]:
        """The group that was made, for its time-out."""
        return () if self._group is None else (self._group,)

    def begin(self, row: Sequence[float]) -> Callable[[], Table]:
        group = self._opened()
        if group is None:
            return Alone().begin(row)
        table = torch.zeros(self._context.world_size, len(row), dtype=torch.float64)
        table[self._context.rank] = torch.tensor(row, dtype=torch.float64)
        work = dist.all_reduce(table, group=group, async_op=True)
        assert work is not None

        def result() -> Table:
            try:
                work.wait()
            except RuntimeError as error:  # gloo's wait raises nothing finer
                raise RunError(
                    f"Rank {self._context.rank} waited in vain for what other ranks read of their streams: {error}\n"
                    "Look into the other ranks' logs; raise backend.timeout if a stream is only slow."
                ) from error
            rows: Table = table.tolist()
            return rows

        return result

    def give(self, value: Any, *, source: int) -> Any:
        group = self._opened()
        if group is None:
            return value
        values = [value if self._context.rank == source else None]
        dist.broadcast_object_list(values, group=group, src=source)
        return values[0]

    def _opened(self) -> dist.ProcessGroup | None:
        """The group; None for one rank alone."""
        if self._group is None and self._context.world_size > 1:
            raise RuntimeError("This exchange wasn't opened: each rank would take its own numbers for those of all.")
        return self._group
