"""Every test here trains through the command; several may look at one run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from framework.launch.warm import WarmServer

Train = Callable[..., Path]


@pytest.fixture(autouse=True)
def _settings_may_change(own_state: None) -> None:
    """The command puts the working directory on sys.path, as `python -m` does."""


@pytest.fixture(scope="module")
def train_once(warm: WarmServer, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """As `train`, for runs that several tests of a module look at; each in a folder of its own."""
    from framework import cli

    def run(*overrides: str, status: int = 0) -> Path:
        folder = tmp_path_factory.mktemp("run")
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.setattr(sys, "path", list(sys.path))
            assert cli.main(["trainer.gpus=0", *overrides], warm=warm) == status
        (run_dir,) = folder.glob("outputs/*/*")
        return run_dir

    return run
