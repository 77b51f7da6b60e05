"""The few collectives used off the step path. Each must be called by every rank, in the same order."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from framework.distributed.context import Context

_CHUNK_BYTES = 16 << 20


def sum_over_ranks(values: Tensor, context: Context) -> Tensor:
    """The element-wise sum over ranks, in place; `values` is one flat tensor on the context's device.

    One call for many numbers: a small all-reduce costs about a millisecond over gloo, however small.
    """
    if context.world_size > 1:
        dist.all_reduce(values)
    return values


def any_over_ranks(flag: bool, context: Context) -> bool:
    """Whether the flag is set on any rank; waits for the device."""
    if context.world_size == 1:
        return flag
    return bool(sum_over_ranks(torch.tensor([float(flag)], device=context.device), context).item())


def gather_to_all(value: Any, context: Context) -> Sequence[Any]:
    """Every rank's value, in the order of ranks. Pickled between our own processes; for small things."""
    if context.world_size == 1:
        return [value]
    values: list[Any] = [None] * context.world_size
    dist.all_gather_object(values, value)
    return values


def gather_bytes(own: Tensor, context: Context) -> list[Tensor]:
    """Every rank's bytes on the first rank, in the order of ranks; an empty list on the others.

    own: uint8 on the CPU, flat, of any size. For large things: they go piece by piece, and to that rank alone.
    """
    if context.world_size == 1:
        return [own]
    sizes = gather_to_all(own.numel(), context)
    gathered = [torch.empty(size, dtype=torch.uint8) for size in sizes] if context.is_main else []
    for begin in range(0, max(sizes), _CHUNK_BYTES):
        piece = torch.zeros(min(_CHUNK_BYTES, max(sizes) - begin), dtype=torch.uint8, device=context.device)
        mine = own[begin : begin + len(piece)]
        piece[: len(mine)].copy_(mine)
        pieces = [torch.empty_like(piece) for _ in gathered]
        dist.gather(piece, pieces if context.is_main else None)
        for whole, given in zip(gathered, pieces, strict=True):
            place = whole[begin : begin + len(given)]
            place.copy_(given[: len(place)])
    return gathered


def gather_to_first(value: Any, context: Context) -> list[Any] | None:
    """Every rank's value on the first rank, in the order of ranks; None on the others.

    Pickled between our own processes. For what all ranks have much of: it goes piece by piece, to that rank alone.
    """
    own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    gathered = gather_bytes(own, context)
    return [pickle.loads(each.numpy().tobytes()) for each in gathered] if context.is_main else None


def from_first(value: Any, context: Context) -> Any:
    """The first rank's value, on every rank; what the others give is left out. Pickled between our own processes."""
    if context.world_size == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def barrier(context: Context) -> None:
    """Wait until every rank is here."""
    if context.world_size > 1:
        dist.barrier()
