"""Buffers (BatchNorm's statistics, say) of replicas: no gradient makes them equal, so rank 0's are given to all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from framework.distributed.collectives import gather_to_all
from framework.distributed.context import Context
from framework.strategies.buckets import by_kind

_FIRST_CAP_BYTES = 250 << 20  # of what is given to all at the start, as DDP does


@torch.no_grad()
def broadcast(tensors: Iterable[Tensor], *, group: dist.ProcessGroup | None = None, source: int = 0) -> None:
    """Rank `source`'s values to all of `group`, by default of the run, in place. Every rank of it must call it.

    One call for each type and device: a small collective costs about a millisecond over gloo, however small.
    """
    for alike in by_kind(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in alike])
        dist.broadcast(flat, group=group, group_src=source)
        for tensor, part in zip(alike, flat.split([tensor.numel() for tensor in alike]), strict=True):
            tensor.copy_(part.view_as(tensor))


def begin_alike(model: nn.Module, *, group: dist.ProcessGroup | None = None) -> None:
    """Give every rank the first one's parameters and buffers, as DDP does at the start. Every rank must call it."""
    for alike in by_kind([*model.parameters(), *model.buffers()], cap_bytes=_FIRST_CAP_BYTES):
        broadcast(alike, group=group)


def buffers_of_ranks(model: nn.Module, context: Context) -> list[dict[str, Tensor]]:
    """Every rank's buffers by name, in the order of ranks. Every rank must call it."""
    mine = {name: buffer.cpu() for name, buffer in model.named_buffers()}
    return list(gather_to_all(mine, context))


@torch.no_grad()
def restore_buffers(model: nn.Module, saved: Sequence[Mapping[str, Any]], context: Context) -> None:
    """Give this rank its own of what `buffers_of_ranks` gave; another number of ranks leaves the model as it is."""
    if len(saved) == context.world_size:
        own = dict(model.named_buffers())
        for name, value in saved[context.rank].items():
            own[name].copy_(value)
