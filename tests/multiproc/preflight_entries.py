"""A preflight in which something is wrong: what torch does is replaced in one rank alone."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from framework.launch.link import Link
from framework.launch.plan import RankArguments
from framework.preflight import order
from framework.preflight.running import preflight_rank


def corrupting(rank: RankArguments, link: Link) -> None:
    """Rank 1 spoils what it gathers, and its irecv returns when the message is there; rank 2 spoils what it sends.

    Each leaves how many groups there were whenever one was destroyed.
    """
    if rank.rank == 1:
        _replace("all_gather_into_tensor", after=lambda arrived, *_: arrived[-1].add_(1.0))
        setattr(order, "dist", _Blocking())  # noqa: B010  # the module has another type
    if rank.rank == 2:
        _replace("send", before=lambda values, *_: values[-1].add_(0.5) if values.numel() > 3 else None)
    order.BLOCKED_S = 0.5
    counted: list[int] = []
    _replace("destroy_process_group", before=lambda *_: counted.append(len(dist.distributed_c10d._world.pg_map)))
    preflight_rank(rank, link)
    Path(rank.run_dir, f"groups_{rank.rank}.json").write_text(json.dumps(counted))


class _Blocking:
    """torch.distributed, where a receive waits for what it receives."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def irecv(self, *given: Any, **named: Any) -> Any:
        work = dist.irecv(*given, **named)
        assert work is not None
        work.wait()
        return SimpleNamespace(wait=lambda: None)  # a second time it would wait for another message


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

    def replaced(*given: Any, **named: Any) -> Any:
        before(*given)
        done = real(*given, **named)
        after(*given)
        return done

    setattr(dist, name, replaced)
