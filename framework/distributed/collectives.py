"""The collectives used off the step path. Every rank must call each of them, in the same order."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from framework.distributed.context import Context
from framework.distributed.process_group import new_group
from framework.errors import RunError

Table = list[list[float]]
"""Each rank's numbers, in the order of ranks."""

_CHUNK_BYTES = 16 << 20


def all_gather_single(output: Tensor, own: Tensor, *, group: dist.ProcessGroup | None = None) -> None:
    """Put the tensors of all ranks into `output`, in rank order."""
    # Older versions of torch have it under another name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output, own, group=group)


def reduce_scatter_single(output: Tensor, own: Tensor, *, group: dist.ProcessGroup | None = None) -> None:
    """Put this rank's part of the sum over ranks into `output`."""
    # Older versions of torch have it under another name.
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    reduce_scatter(output, own, group=group)


def sum_over_ranks(values: Tensor, context: Context) -> Tensor:
    """Replace `values`, on the context's device, by their sum over ranks and return them.

    Make one call for many numbers: a small all-reduce costs about a millisecond over gloo, however small.
    """
    if context.world_size > 1:
        dist.all_reduce(values)
    return values


def any_over_ranks(flag: bool, context: Context) -> bool:
    """Return True if the flag is set on any rank; waits for the device."""
    if context.world_size == 1:
        return flag
    count = torch.tensor([float(flag)], device=context.device)
    return bool(sum_over_ranks(count, context).item())


def gather_to_all(value: Any, context: Context, *, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the value of every rank of `group` (None: of the run), in the order of ranks.

    Pickled between our own processes; for small values.
    """
    if context.world_size == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def gather_to_first(value: Any, context: Context) -> list[Any]:
    """Return every rank's value on the first rank, in the order of ranks; an empty list on the others.

    Pickled between our own processes. For large values: they are sent in pieces, and to that rank alone.
    """
    if context.world_size == 1:
        return [value]
    own = pickle.dumps(value)
    # The pickled values of all ranks.
    contents = [bytearray() for _ in range(context.world_size)]
    longest = max(gather_to_all(len(own), context))
    for begin in range(0, longest, _CHUNK_BYTES):
        pieces: list[Any] | None = None
        if context.is_main:
            pieces = [None] * context.world_size
        dist.gather_object(own[begin : begin + _CHUNK_BYTES], pieces)
        if pieces is not None:
            for content, piece in zip(contents, pieces, strict=True):
                content += piece
    if not context.is_main:
        return []
    return [pickle.loads(content) for content in contents]


def broadcast_object(value: Any, context: Context, *, source: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """Return, on every rank of `group` (None: all ranks), the value that the group's rank `source` has.

    Pickled between our own processes.
    """
    if context.world_size == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, group=group, group_src=source)
    return values[0]


def barrier(context: Context) -> None:
    """Wait until every rank is here."""
    if context.world_size > 1:
        dist.barrier()


@final
class SideChannel:
    """Exchanges a few numbers of every rank beside training, over a gloo group of its own.

    Ranks make the same calls in the same order. Every rank must call `open` in the process group before the first
    exchange, which may take `timeout_s`.
    """

    def __init__(self, context: Context, *, timeout_s: float) -> None:
        self._context = context
        self._timeout_s = timeout_s
        self._group: dist.ProcessGroup | None = None

    def open(self) -> None:
        if self._context.world_size > 1 and self._group is None:
            self._group = new_group(self._timeout_s, is_monitored=True)

    @property
    def groups(self) -> Sequence[dist.ProcessGroup]:
        """The group that was made, for its time-out."""
        if self._group is None:
            return ()
        return (self._group,)

    def gather(self, row: Sequence[float]) -> Callable[[], Table]:
        """Send this rank's numbers, as many as the others'; return a function that waits for those of all."""
        if self._context.world_size == 1:
            return lambda: [list(row)]
        table = torch.zeros(self._context.world_size, len(row), dtype=torch.float64)
        table[self._context.rank] = torch.tensor(row, dtype=torch.float64)
        work = dist.all_reduce(table, group=self._group, async_op=True)
        assert work is not None

        def result() -> Table:
            try:
                work.wait()
            except RuntimeError as error:
                # gloo's wait raises nothing finer.
                raise RunError(
                    f"Rank {self._context.rank} timed out waiting for what other ranks read of their streams: {error}\n"
                    "Look at the other ranks' logs; raise backend.timeout if a stream is only slow."
                ) from error
            rows: Table = table.tolist()
            return rows

        return result

    def broadcast(self, value: Any, *, source: int) -> Any:
        """Return the value that rank `source` has, on every rank. Pickled between our own processes."""
        return broadcast_object(value, self._context, source=source, group=self._group)
