"""The usual choice: nothing for one process, DDP for several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from framework.distributed.context import Context
from framework.strategies.ddp import DDP
from framework.strategies.single import Single


def auto(
    *,
    context: Context,
    broadcast_buffers: bool = True,
    bucket_cap_mb: float = 25,
    find_unused_parameters: bool = False,
    gradient_as_bucket_view: bool = True,
    static_graph: bool = False,
    comm_hook: str | Mapping[str, Any] | None = None,
    sync_batchnorm: bool = False,
) -> Single | DDP:
    """`Single` for one process, else `DDP` with these keywords, so that a config needn't know how many there are."""
    if context.world_size == 1:
        return Single(context=context)
    return DDP(
        context=context,
        broadcast_buffers=broadcast_buffers,
        bucket_cap_mb=bucket_cap_mb,
        find_unused_parameters=find_unused_parameters,
        gradient_as_bucket_view=gradient_as_bucket_view,
        static_graph=static_graph,
        comm_hook=comm_hook,
        sync_batchnorm=sync_batchnorm,
    )
