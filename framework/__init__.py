"""A declarative PyTorch training framework: YAML says what, one engine does how.

These are the public names, for recipes and for a user's own code. Importing them loads neither torch nor Hydra.
"""

from __future__ import annotations

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
    from framework.data.files import Resource, local_files

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
    "local_files",
]

_LAZY = {"Resource", "local_files"}  # of framework.data.files, which imports what downloads


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from framework.data import files

        return getattr(files, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
