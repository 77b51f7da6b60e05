"""A declarative PyTorch training framework: YAML says what, one engine does how.

These are the public names, for recipes and for a user's own code. Importing them loads neither torch nor Hydra.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from framework.errors import ConfigError, DataError, FrameworkError, RequestError, RunError
from framework.types import (
    Artifact,
    Batch,
    Callback,
    Datasets,
    EpochReport,
    EvalReport,
    Figure,
    FitInfo,
    Histogram,
    Image,
    Logger,
    MapDataset,
    Media,
    Phase,
    Report,
    Sampler,
    StatefulMetric,
    StepInfo,
    StepOutput,
    StepReport,
    Stop,
    SumCount,
    Table,
    Task,
    Text,
)

if TYPE_CHECKING:
    from framework.api.call import RunFailedError
    from framework.api.run import Run, load
    from framework.api.train import train
    from framework.data import samplers, transforms
    from framework.data.tensor_samples import TensorSamples
    from framework.strategies.base import Strategy

__all__ = [
    "Artifact",
    "Batch",
    "Callback",
    "ConfigError",
    "DataError",
    "Datasets",
    "EpochReport",
    "EvalReport",
    "Figure",
    "FitInfo",
    "FrameworkError",
    "Histogram",
    "Image",
    "Logger",
    "MapDataset",
    "Media",
    "Phase",
    "Report",
    "RequestError",
    "Run",
    "RunError",
    "RunFailedError",
    "Sampler",
    "StatefulMetric",
    "StepInfo",
    "StepOutput",
    "StepReport",
    "Stop",
    "Strategy",
    "SumCount",
    "Table",
    "Task",
    "TensorSamples",
    "Text",
    "load",
    "samplers",
    "train",
    "transforms",
]

_IMPORTED_LATE = {
    "Run": "framework.api.run",
    "RunFailedError": "framework.api.call",
    "Strategy": "framework.strategies.base",
    "TensorSamples": "framework.data.tensor_samples",
    "load": "framework.api.run",
    "train": "framework.api.train",
}
"""Public names that need torch or Hydra, and their modules."""


def __getattr__(name: str) -> Any:
    """Import what needs torch or Hydra when it is first used."""
    if name in _IMPORTED_LATE:
        return getattr(import_module(_IMPORTED_LATE[name]), name)
    if name in ("samplers", "transforms"):
        return import_module(f"framework.data.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
