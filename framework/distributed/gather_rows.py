"""Gather the rows of tensors over ranks, with their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from framework.distributed.collectives import all_gather_single, reduce_scatter_single


def gather_rows(own: Tensor, *, sizes: Sequence[int], rank: int) -> Tensor:
    """Return the rows of all ranks, in the order of ranks. Every rank must call it.

    The gradient of this rank's rows is the sum over ranks of the gradients of the result. So every rank's backward must
    pass through it, or none's.

    Args:
        own: This rank's rows, of shape (sizes[rank], …).
        sizes: How many rows each rank has.
    """
    rows: Tensor = _GatherRows.apply(own, sizes, rank)
    return rows


class _GatherRows(torch.autograd.Function):
    """Rows are padded to the largest size, as the collectives need it."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, sizes: Sequence[int], rank: int) -> Tensor:
        ctx.sizes = sizes
        ctx.rank = rank
        padded = own.new_zeros(max(sizes), *own.shape[1:])
        padded[: len(own)] = own
        gathered = own.new_empty(len(sizes), *padded.shape)
        all_gather_single(gathered.flatten(0, 1), padded)
        return torch.cat([rows[:size] for rows, size in zip(gathered, sizes, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        sizes = ctx.sizes
        padded = gradient.new_zeros(len(sizes), max(sizes), *gradient.shape[1:])
        for rows, part in zip(padded, gradient.split(list(sizes)), strict=True):
            rows[: len(part)] = part
        own = torch.empty_like(padded[0])
        reduce_scatter_single(own, padded.flatten(0, 1))
        return own[: sizes[ctx.rank]], None, None
