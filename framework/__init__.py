"""A declarative PyTorch training framework: YAML says what, one engine does how.

These are the public names, for recipes and for a user's own code. Importing them loads neither torch nor Hydra.
"""

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
    "RunError",
    "StepOutput",
    "StepReport",
    "Stop",
    "Strategy",
    "SumCount",
    "Task",
]
