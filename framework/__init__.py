"""A declarative PyTorch training framework: YAML says what, one engine does how.

These are the public names, for recipes and for a user's own code. Importing them loads neither torch nor Hydra.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from framework.errors import ConfigError, DataError, FrameworkError, RequestError, RunError
from framework.types import (
    Batch,
    Callback,
    Datasets,
    EvalReport,
    FitInfo,
    Logger,
    MapDataset,
    StepOutput,
    StepReport,
    Stop,
    Strategy,
    SumCount,
    Task,
)

if TYPE_CHECKING:
    from framework.data import transforms
    from framework.data.cache import cached_tensors
    from framework.data.files import Resource, local_files
    from framework.data.rows import TensorSamples

__all__ = [
    "Batch",
    "Callback",
    "ConfigError",
    "DataError",
    "Datasets",
    "EvalReport",
    "FitInfo",
    "FrameworkError",
    "Logger",
    "MapDataset",
    "RequestError",
    "Resource",
    "RunError",
    "StepOutput",
    "StepReport",
    "Stop",
    "Strategy",
    "SumCount",
    "Task",
    "TensorSamples",
    "cached_tensors",
    "local_files",
    "transforms",
]

_LAZY = {"Resource": "files", "local_files": "files", "TensorSamples": "rows", "cached_tensors": "cache"}
"""Of modules in framework.data, which import torch, or what downloads."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"framework.data.{_LAZY[name]}"), name)
    if name == "transforms":
        return import_module("framework.data.transforms")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
