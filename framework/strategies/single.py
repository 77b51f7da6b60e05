"""One process, and `auto`: DDP if there are several."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, final

from torch import nn

from framework.config.topology import check_strategy_fits
from framework.distributed.context import Context
from framework.strategies.base import Strategy
from framework.strategies.ddp import DDP


@final
class Single(Strategy):
    """One process. Raises TopologyError with more than one."""

    def __init__(self, *, context: Context) -> None:
        check_strategy_fits("Single", context.topology, backend=context.backend)

    def rewrap(self, model: nn.Module, *, changed: Mapping[str, bool]) -> nn.Module:
        return model


def auto(*, context: Context, **options: Any) -> Single | DDP:
    """Return `Single` for one process, else `DDP` with these keywords: the config needn't know how many there are."""
    return Single(context=context) if context.world_size == 1 else DDP(context=context, **options)


auto.__signature__ = inspect.signature(DDP)  # type: ignore[attr-defined]  # by which keywords are checked
