"""The lock of a data module's preparation: one for each data set, in a folder of the user's own."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from torch.utils.data import DataLoader

from framework.errors import DataError
from tests.helpers.internals import datamodule, lightning_data_module


class Data:
    """A data module, without Lightning's base, which takes seconds to import. Notes which locks are held."""

    def __init__(self, data_dir: str | Path = "data", batch_size: int = 4, output_dir: str = "out") -> None:
        self.data_dir = data_dir
        self.batch_size = batch_size
        self.output_dir = output_dir

    def prepare_data(self) -> None:
        self.held = [file for folder in self.folders() if folder.is_dir() for file in folder.iterdir() if is_held(file)]

    @staticmethod
    def folders() -> list[Path]:
        return [lightning_data_module._lock_folder()]

    def setup(self, stage: str) -> None:
        pass

    def train_dataloader(self) -> Any:
        return DataLoader([1, 2, 3, 4])  # type: ignore[arg-type]

    val_dataloader = test_dataloader = train_dataloader


class OtherData(Data):
    pass


def is_held(file: Path) -> bool:
    lock = FileLock(file)
    try:
        lock.acquire(timeout=0)
    except TimeoutError:
        return True
    lock.release()
    return False


def lock_of(module: Data) -> Path:
    datamodule(module)
    (file,) = module.held
    return file


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / "cache"


def test_each_dataset_has_its_lock_file(cache: Path) -> None:
    file = lock_of(Data())
    assert file.parent == cache / "framework" / "locks"
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    # What says nothing about where the data are doesn't matter.
    assert lock_of(Data(Path("data").absolute(), batch_size=8, output_dir="other")) == file
    assert len({file, lock_of(Data("elsewhere")), lock_of(OtherData())}) == 3


def test_a_lock_that_is_held_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    file = lock_of(Data())
    monkeypatch.setattr(lightning_data_module, "_SILENT_S", 0.01)
    monkeypatch.setattr(lightning_data_module, "_LOCK_TIMEOUT_S", 0.01)
    with FileLock(file), pytest.raises(DataError, match=f"Data: another process .* still holds {file}"):
        datamodule(Data())
    assert f"Waiting for another process that prepares the data of Data (it holds {file})" in capsys.readouterr().out
    lock_of(Data())


def test_without_a_cache_a_private_folder_is_used(cache: Path, tmp_path: Path) -> None:
    cache.write_text("a file, so there can be no folder")
    folder = lock_of(Data()).parent
    assert folder == tmp_path / f"framework_locks_{os.getuid()}"
    # One that others can write, as an attacker would make it, isn't.
    folder.chmod(0o777)
    with pytest.raises(DataError, match="XDG_CACHE_HOME"):
        datamodule(Data())
