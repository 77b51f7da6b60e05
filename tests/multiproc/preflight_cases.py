"""Strategies that break what they stand on: each replaces functions of torch in the process of one rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from framework.strategies import DDP
from tests.helpers.internals import Context


def faulty(*, context: Context) -> DDP:
    """Rank 1 spoils what it gathers and has a slow way to rank 2; rank 2 spoils what it sends."""
    if context.rank == 1:
        name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
        _replace(name, after=lambda arrived, *_: arrived[-1].add_(1.0))
        _replace("send", before=lambda values, to, *_: time.sleep(0.05) if to == 2 and values.numel() > 3 else None)
    if context.rank == 2:
        _replace("send", before=lambda values, *_: values[-1].add_(0.5) if values.numel() > 3 else None)
        _replace("batch_isend_irecv", before=lambda messages: messages[0].tensor[-1].add_(0.5))
    return DDP(context=context)


def hanging(*, context: Context) -> DDP:
    """Rank 1 never comes to the broadcast."""
    if context.rank == 1:
        _replace("broadcast", before=lambda *_: time.sleep(60.0))
    return DDP(context=context)


def _replace(
    name: str, *, before: Callable[..., Any] = lambda *_: None, after: Callable[..., Any] = lambda *_: None
) -> None:
    """Replace a function of torch.distributed in this process, which no other run uses."""
    real = getattr(dist, name)

    def replaced(*given: Any, **named: Any) -> Any:
        before(*given)
        done = real(*given, **named)
        after(*given)
        return done

    setattr(dist, name, replaced)
