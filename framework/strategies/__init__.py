"""How replicas stay equal: `strategy=` chooses one. Contract: `framework.types.Strategy`."""

from framework.strategies.auto import auto
from framework.strategies.ddp import DDP
from framework.strategies.single import Single

__all__ = ["DDP", "Single", "auto"]
