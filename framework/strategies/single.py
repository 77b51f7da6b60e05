"""The model as it is."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

from torch import nn

from framework.distributed.context import Context
from framework.topology import check_strategy_fits

_NOTHING: AbstractContextManager[Any] = nullcontext()


class AsItIs:
    """No wrapping and no exchange, however many processes there are: the replicas of several drift apart."""

    def wrap(self, model: nn.Module) -> nn.Module:
        return model

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model

    def rewrap(self, model: nn.Module, *, changed: Mapping[str, bool]) -> nn.Module:
        return model

    def before_evaluation(self, model: nn.Module) -> None:
        return None

    def accumulate(self, model: nn.Module, *, synchronise: bool) -> AbstractContextManager[Any]:
        return _NOTHING


@final
class Single(AsItIs):
    """One process. Raises TopologyError with more than one."""

    def __init__(self, *, context: Context) -> None:
        check_strategy_fits("Single", context.topology, backend=context.backend)
