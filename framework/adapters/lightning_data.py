"""The data of a LightningDataModule."""

from __future__ import annotations

import getpass
import tempfile
from pathlib import Path
from typing import Any

from filelock import FileLock

from framework.distributed.seed import preserved_generators, seed_generators
from framework.errors import DataError
from framework.types import Datasets

_LOCK_TIMEOUT_S = 1800.0  # of other processes' prepare_data
_HOOKS = ("transfer_batch_to_device", "on_before_batch_transfer", "on_after_batch_transfer")


def datamodule(module: Any) -> Datasets:
    """Return the loaders of a LightningDataModule, or of a LightningModule that has its own, for `data.datasets`.

    The processes of a node call `prepare_data`, `setup("fit")` and, with a `test_dataloader`, `setup("test")` one after
    another, with the same global seed in every process and run. Several validation or test loaders are sets, by their
    names or numbers. Raises DataError for a hook without a counterpart.
    """
    if refused := [hook for hook in _HOOKS if _overrides(module, hook)]:
        raise DataError(
            f"{type(module).__name__}.{refused[0]} has no counterpart: batches are moved to the device as they are.\n"
            "Do it in the dataset or the collate function, or in on_after_batch_transfer of the LightningModule."
        )
    with preserved_generators(), FileLock(_lock_file(), timeout=_LOCK_TIMEOUT_S):
        seed_generators(0)
        module.prepare_data()
        module.setup("fit")
        parts = {"train": module.train_dataloader()}
        if _overrides(module, "val_dataloader"):
            parts["val"] = _sets(module.val_dataloader())
        if _overrides(module, "test_dataloader"):
            module.setup("test")
            parts["test"] = _sets(module.test_dataloader())
    return Datasets(**parts)


def _sets(loaders: Any) -> Any:
    """Return one loader as it is, several by name."""
    if not isinstance(loaders, (list, tuple)):
        return loaders
    return loaders[0] if len(loaders) == 1 else {str(number): each for number, each in enumerate(loaders)}


def _overrides(module: Any, name: str) -> bool:
    """Return True if a class of the user, or the object itself, defines the method."""
    own = next((cls for cls in type(module).__mro__ if name in vars(cls)), object)
    return name in vars(module) or own.__module__.partition(".")[0] not in ("lightning", "pytorch_lightning")


def _lock_file() -> Path:
    return Path(tempfile.gettempdir()) / f"framework_prepare_data_{getpass.getuser()}.lock"
