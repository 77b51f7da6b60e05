"""A declarative PyTorch training framework: YAML says what, one engine does how.

These are the public names, for recipes and for a user's own code. Importing them loads neither torch nor Hydra.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from framework.errors import ConfigError, DataError, FrameworkError, RequestError, RunError
from framework.media import Artifact, Figure, Histogram, Image, Media, Table, Text
from framework.types import (
    Batch,
    BatchInfo,
    Callback,
    Datasets,
    EpochInfo,
    EvalInfo,
    FitInfo,
    Log,
    Logger,
    MapDataset,
    MicroBatchInfo,
    Objective,
    Sampler,
    Source,
    StatefulMetric,
    StepInfo,
    StepOutput,
    Stop,
    SumCount,
    Task,
)

if TYPE_CHECKING:
    from framework.api.call import RunFailedError
    from framework.api.run import Run, load
    from framework.api.train import train
    from framework.command.job import Job
    from framework.data import samplers, transforms
    from framework.data.mix import Mix
    from framework.data.tensor_samples import TensorSamples
    from framework.data.token_file import TokenFile
    from framework.strategies.base import Strategy, StrategyCosts

__all__ = [
    "Artifact",
    "Batch",
    "BatchInfo",
    "Callback",
    "ConfigError",
    "DataError",
    "Datasets",
    "EpochInfo",
    "EvalInfo",
    "Figure",
    "FitInfo",
    "FrameworkError",
    "Histogram",
    "Image",
    "Job",
    "Log",
    "Logger",
    "MapDataset",
    "Media",
    "MicroBatchInfo",
    "Mix",
    "Objective",
    "RequestError",
    "Run",
    "RunError",
    "RunFailedError",
    "Sampler",
    "Source",
    "StatefulMetric",
    "StepInfo",
    "StepOutput",
    "Stop",
    "Strategy",
    "StrategyCosts",
    "SumCount",
    "Table",
    "Task",
    "TensorSamples",
    "Text",
    "TokenFile",
    "load",
    "samplers",
    "train",
    "transforms",
]

_IMPORTED_LATE = {
    "Job": "framework.command.job",
    "Mix": "framework.data.mix",
    "Run": "framework.api.run",
    "RunFailedError": "framework.api.call",
    "Strategy": "framework.strategies.base",
    "StrategyCosts": "framework.strategies.base",
    "TensorSamples": "framework.data.tensor_samples",
    "TokenFile": "framework.data.token_file",
    "load": "framework.api.run",
    "train": "framework.api.train",
}
"""Public names that need torch or Hydra, and their modules."""

_RENAMED = {
    "EpochReport": "EpochInfo",
    "EvalReport": "EvalInfo",
    "Phase": "Objective",
    "Report": "Log",
    "StepReport": "StepInfo",
}
"""Earlier public names, which keep working."""


_INSTALLED = Path(__file__).parent / "installed"
"""In an installation, the folder with the folder `recipes`; a repository has it at the top."""

# Last, so that `recipes` of the working directory come first. Neither has an __init__.py: Python merges them.
if _INSTALLED.is_dir() and str(_INSTALLED) not in sys.path:
    sys.path.append(str(_INSTALLED))


def __getattr__(name: str) -> Any:
    """Import what needs torch or Hydra when it is first used."""
    if name in _IMPORTED_LATE:
        return getattr(import_module(_IMPORTED_LATE[name]), name)
    if name in ("samplers", "transforms"):
        return import_module(f"framework.data.{name}")
    if name in _RENAMED:
        warnings.warn(f"framework.{name} is now framework.{_RENAMED[name]}.", FutureWarning, stacklevel=2)
        return globals()[_RENAMED[name]]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
