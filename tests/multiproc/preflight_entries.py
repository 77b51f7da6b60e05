"""A preflight in which something is wrong: what torch does is replaced in one rank alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from framework.launch.link import Link
from framework.launch.plan import RankArguments
from framework.preflight.running import preflight_rank


def corrupting(rank: RankArguments, link: Link) -> None:
    """Rank 1 spoils what it gathers, and rank 2 what it sends."""
    if rank.rank == 1:
        _replace("all_gather_into_tensor", after=lambda arrived, *_: arrived[-1].add_(1.0))
    if rank.rank == 2:
        _replace("send", before=lambda values, *_: values[-1].add_(0.5) if values.numel() > 3 else None)
    preflight_rank(rank, link)


def hanging(rank: RankArguments, link: Link) -> None:
    """Rank 1 never comes to the broadcast."""
    if rank.rank == 1:
        _replace("broadcast", before=lambda *_: time.sleep(60.0))
    preflight_rank(rank, link)


def _replace(
    name: str, *, before: Callable[..., Any] = lambda *_: None, after: Callable[..., Any] = lambda *_: None
) -> None:
    """In this process, which the test has to itself."""
    real = getattr(dist, name)

    def replaced(values: Tensor, *others: Any, **named: Any) -> Any:
        before(values, *others)
        done = real(values, *others, **named)
        after(values, *others)
        return done

    setattr(dist, name, replaced)
