"""Train code written for another framework, unchanged. Start with `lightning`.

Importing this package doesn't import the other framework; the user's module does.
"""

from framework.adapters.lightning import LightningTask
from framework.adapters.lightning_data import datamodule

__all__ = ["LightningTask", "datamodule"]
