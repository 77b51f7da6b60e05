"""Where a run's numbers go. Each logger is made on rank 0 only and gets the run directory as the keyword `run_dir`."""

from framework.loggers.console import ConsoleLogger
from framework.loggers.jsonl import JsonlLogger
from framework.loggers.tensorboard import TensorBoardLogger

__all__ = ["ConsoleLogger", "JsonlLogger", "TensorBoardLogger"]
