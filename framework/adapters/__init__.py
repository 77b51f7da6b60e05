"""Code written for another framework, trained as it is: start with `lightning`.

Importing this package doesn't import that framework: the user's own module does.
"""

from framework.adapters.lightning import LightningTask
from framework.adapters.lightning_data import datamodule

__all__ = ["LightningTask", "datamodule"]
