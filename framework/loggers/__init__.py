"""Loggers for a run's numbers and media. They are built on rank 0 only, and get the run directory as `run_dir`.

One file for each. `tracker` is the base of those that call a tracker's library; `media` converts images and the like.
"""

from framework.loggers.console import ConsoleLogger
from framework.loggers.jsonl import JsonlLogger
from framework.loggers.mlflow import MLflowLogger
from framework.loggers.tensorboard import TensorBoardLogger
from framework.loggers.wandb import WandbLogger

__all__ = ["ConsoleLogger", "JsonlLogger", "MLflowLogger", "TensorBoardLogger", "WandbLogger"]
