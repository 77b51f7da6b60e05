"""Train a LightningModule unchanged. Start with `task`.

Importing this package doesn't import Lightning; the user's module does.
"""

from framework.tasks.lightning.data import datamodule
from framework.tasks.lightning.task import LightningTask, configure_optimizers, lr_scheduler

__all__ = ["LightningTask", "configure_optimizers", "datamodule", "lr_scheduler"]
