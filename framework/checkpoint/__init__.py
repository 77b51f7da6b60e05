"""Checkpoints: what lies in one, writing it so that a kill loses nothing, finding it and reading it back safely.

The names are loaded when they are first used: `find` and `read_manifest` need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from framework.checkpoint.lookup import complete_steps, find, read_manifest
    from framework.checkpoint.manager import CheckpointManager
    from framework.checkpoint.plain import check_plain
    from framework.checkpoint.store import load, write
    from framework.checkpoint.weights import load_weights

__all__ = [
    "CheckpointManager",
    "check_plain",
    "complete_steps",
    "find",
    "load",
    "load_weights",
    "read_manifest",
    "write",
]

_MODULES = {
    "CheckpointManager": "manager",
    "check_plain": "plain",
    "complete_steps": "lookup",
    "find": "lookup",
    "load": "store",
    "load_weights": "weights",
    "read_manifest": "lookup",
    "write": "store",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
