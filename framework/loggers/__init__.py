"""Where a run's numbers go. Loggers are built on rank 0 only, and get the run directory as the keyword `run_dir`."""

from framework.loggers.console import ConsoleLogger
from framework.loggers.jsonl import JsonlLogger
from framework.loggers.tensorboard import TensorBoardLogger

__all__ = ["ConsoleLogger", "JsonlLogger", "TensorBoardLogger"]
