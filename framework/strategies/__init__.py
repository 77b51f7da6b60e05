"""How replicas stay equal: `strategy=` chooses one. Start with `base`, the class that all inherit from."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from framework.strategies.allreduce import AllReduce, Butterfly
    from framework.strategies.base import Single
    from framework.strategies.ddp import DDP, auto
    from framework.strategies.fsdp import FSDP
    from framework.strategies.local_sgd import LocalSGD
    from framework.strategies.pipeline import Pipeline

__all__ = ["DDP", "FSDP", "AllReduce", "Butterfly", "LocalSGD", "Pipeline", "Single", "auto"]

# Imported when they are asked for: `rules` needs no torch, and what `fsdp` and `pipeline` need of it takes most of a
# second.
_MODULES = {
    "AllReduce": "allreduce",
    "Butterfly": "allreduce",
    "DDP": "ddp",
    "FSDP": "fsdp",
    "LocalSGD": "local_sgd",
    "Pipeline": "pipeline",
    "Single": "base",
    "auto": "ddp",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
