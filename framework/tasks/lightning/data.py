"""The data of a LightningDataModule."""

from __future__ import annotations

import hashlib
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

from framework.config.schema import Config
from framework.data.from_dataloader import combine
from framework.distributed.context import Context
from framework.distributed.seed import preserved_generators, seed_generators
from framework.errors import DataError
from framework.system.private_folder import private_folders, private_places
from framework.system.rank_log import warn
from framework.tasks.lightning.trainer import TrainerView, trainer_of
from framework.types import Datasets

# How long to wait for other processes' prepare_data.
_LOCK_TIMEOUT_S = 1800.0
# How long to wait without a word, as ranks do for one another.
_SILENT_S = 5.0
# Settings of a data module that say where its data is.
_NAMES_DATA = re.compile(r"data|root|cache|download|^(dir|directory|folder|path)$", re.IGNORECASE)


def datamodule(module: Any, *, run_config: Config | None = None, run_context: Context | None = None) -> Datasets:
    """Return the loaders of a LightningDataModule, or of a LightningModule that has its own, for `data.datasets`.

    The processes of a node call `prepare_data`, `setup("fit")` and, with a `test_dataloader`, `setup("test")` one after
    another, with the same global seed in every process and run. Several validation or test loaders are sets, by their
    names or numbers.

    run_config, run_context: passed by the framework, to make the module's `self.trainer`.
    """
    trainer: TrainerView | None = None
    if run_config is not None and run_context is not None:
        trainer = trainer_of(run_config, run_context)
        trainer.datamodule = module
        module.trainer = trainer
    with preserved_generators(), _prepared_alone(module):
        seed_generators(0)
        module.prepare_data()
        module.setup("fit")
        loaders = {"train": module.train_dataloader()}
        if overrides_method(module, "val_dataloader"):
            loaders["val"] = module.val_dataloader()
        if overrides_method(module, "test_dataloader"):
            module.setup("test")
            loaders["test"] = module.test_dataloader()
    if trainer is not None:
        trainer.train_dataloader = _without_mode(loaders["train"])
        trainer.val_dataloaders = _without_mode(loaders.get("val"))
        trainer.test_dataloaders = _without_mode(loaders.get("test"))
    evaluated = {part: _sets(loaders[part], part) for part in loaders if part != "train"}
    train = loaders["train"]
    if not _is_combined(train) and not isinstance(train, (list, tuple, Mapping)):
        return Datasets(train=train, **evaluated)
    return replace(_combined(train), **evaluated)


def _is_combined(loaders: Any) -> bool:
    """Return True for Lightning's CombinedLoader."""
    module = type(loaders).__module__
    return type(loaders).__name__ == "CombinedLoader" and module.endswith("utilities.combined_loader")


def _without_mode(loaders: Any) -> Any:
    """Return the loaders as the trainer shows them: those of a CombinedLoader in their structure."""
    return loaders.iterables if _is_combined(loaders) else loaders


def _combined(loaders: Any) -> Datasets:
    """Return several train loaders as one part. Without a CombinedLoader, the shorter ones start again."""
    mode = "max_size_cycle"
    if _is_combined(loaders):
        mode = loaders._mode
    paths, structure = tree_flatten_with_path(_without_mode(loaders))
    by_name = {keystr(path): loader for path, loader in paths}
    return combine(by_name, mode=mode, arrange=partial(tree_unflatten, treespec=structure))


def _sets(loaders: Any, part: str) -> Any:
    """Return one loader as it is, several by name."""
    if _is_combined(loaders):
        if loaders._mode != "sequential":
            raise DataError(
                f"The {part} part is a CombinedLoader with mode={loaders._mode}, whose sets would share batches. Each "
                "set is evaluated by itself: use mode=sequential, or return the loaders in a list or dict."
            )
        loaders = loaders.iterables
    if not isinstance(loaders, (list, tuple)):
        return loaders
    if len(loaders) == 1:
        return loaders[0]
    return {str(number): loader for number, loader in enumerate(loaders)}


def overrides_method(module: Any, name: str) -> bool:
    """Return True if a class of the user, or the object itself, defines the method."""
    if name in vars(module):
        return True
    for cls in type(module).__mro__:
        if name in vars(cls):
            package = cls.__module__.partition(".")[0]
            return package not in ("lightning", "pytorch_lightning")
    return False


@contextmanager
def _prepared_alone(module: Any) -> Iterator[None]:
    """Let only one process of this user on this machine prepare this data at a time.

    Raises DataError if another one holds the lock for too long, or if there is no folder for it.
    """
    name = type(module).__name__
    file = _lock_folder() / f"{_data_id(module)}.lock"
    lock = FileLock(file)
    try:
        lock.acquire(timeout=_SILENT_S)
    except Timeout:
        warn(f"Waiting for another process that prepares the data of {name} (it holds {file}).")
        try:
            lock.acquire(timeout=_LOCK_TIMEOUT_S)
        except Timeout:
            raise DataError(
                f"{name}: another process has prepared its data for {_LOCK_TIMEOUT_S / 60:.0f} minutes, and still "
                f"holds {file}.\nEnd that process, or wait for it and start again."
            ) from None
    try:
        yield
    finally:
        lock.release()


def _data_id(module: Any) -> str:
    """Return a name for a data set on this machine: the data module's class and the locations in its settings."""
    settings = {**dict(getattr(module, "hparams", {})), **vars(module)}
    places = []
    for name, value in settings.items():
        if isinstance(name, str) and isinstance(value, (str, Path)) and _NAMES_DATA.search(name):
            places.append(f"{name}={Path(value).expanduser().absolute()}")
    kind = type(module)
    text = "\n".join([kind.__module__, kind.__qualname__, socket.gethostname(), *sorted(places)])
    return f"{kind.__name__}_{hashlib.sha256(text.encode(errors='replace')).hexdigest()[:16]}"


def _lock_folder() -> Path:
    """Return a folder that only this user can write: in the cache, or if that can't be written, a temporary one."""
    folder = next(private_folders("locks"), None)
    if folder is None:
        first, second = private_places("locks")
        raise DataError(
            f"Neither {first} nor {second} is a folder that this user alone can write, for the lock of "
            "prepare_data. Set XDG_CACHE_HOME to a folder of yours."
        )
    return folder
