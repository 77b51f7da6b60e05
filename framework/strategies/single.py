"""One process, the model as it is."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

from torch import nn

from framework.distributed.context import Context
from framework.errors import TopologyError

_NOTHING: AbstractContextManager[Any] = nullcontext()


@final
class Single:
    """No wrapping and no exchange. Raises TopologyError with more than one process: replicas would drift apart."""

    def __init__(self, *, context: Context) -> None:
        if context.world_size > 1:
            raise TopologyError(
                f"strategy=single is for one process, and there are {context.world_size}.\n"
                "Use strategy=ddp (or auto), or topology.procs_per_node=1."
            )

    def wrap(self, model: nn.Module) -> nn.Module:
        return model

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model

    def before_evaluation(self, model: nn.Module) -> None:
        return None

    def accumulate(self, model: nn.Module, *, synchronise: bool) -> AbstractContextManager[Any]:
        return _NOTHING
