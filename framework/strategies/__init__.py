"""How replicas stay equal: `strategy=` chooses one. Contract: `framework.types.Strategy`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from framework.strategies.allreduce import AllReduce
from framework.strategies.auto import auto
from framework.strategies.butterfly import Butterfly
from framework.strategies.ddp import DDP
from framework.strategies.local_sgd import LocalSGD
from framework.strategies.single import Single

if TYPE_CHECKING:
    from framework.strategies.fsdp import FSDP

__all__ = ["DDP", "FSDP", "AllReduce", "Butterfly", "LocalSGD", "Single", "auto"]


def __getattr__(name: str) -> Any:
    if name == "FSDP":  # what it needs of torch takes most of a second to import
        return import_module(f"{__name__}.fsdp").FSDP
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
