"""The few collectives used off the step path. Each must be called by every rank, in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from framework.distributed.context import Context


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


def barrier(context: Context) -> None:
    """Wait until every rank is here."""
    if context.world_size > 1:
        dist.barrier()
