"""How replicas stay equal: `strategy=` chooses one. Start with `base`, the class that all inherit from."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from framework.strategies.allreduce import AllReduce, Butterfly
from framework.strategies.base import Single
from framework.strategies.ddp import DDP, auto
from framework.strategies.local_sgd import LocalSGD

if TYPE_CHECKING:
    from framework.strategies.fsdp import FSDP
    from framework.strategies.pipeline import Pipeline

__all__ = ["DDP", "FSDP", "AllReduce", "Butterfly", "LocalSGD", "Pipeline", "Single", "auto"]

# Imported when they are first used: what they need of torch takes most of a second to import.
_LAZY = ("FSDP", "Pipeline")


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"{__name__}.{name.lower()}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
