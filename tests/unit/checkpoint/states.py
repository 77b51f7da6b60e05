"""Small states of the shape a training gives, and the checkpoints of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from framework.checkpoint import LocalStorage
from tests.helpers.internals import CheckpointConfig, CheckpointManager, parse, write_checkpoint
from tests.unit.config.raw import raw_config


def small_state(value: float = 1.0) -> dict[str, Any]:
    return {
        "model": {"weight": torch.full((2, 3), value), "bias": torch.full((2,), value)},
        "training": {"optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": []}, "callbacks": {}},
        "generators": [{"torch": torch.get_rng_state()}],
    }


def write_small(
    folder: Path,
    step: int,
    *,
    value: float | None = None,
    metrics: dict[str, float] | None = None,
    config_text: str = "recipe: small\n",
) -> Path:
    return folder / write_checkpoint(
        LocalStorage(folder),
        small_state(float(step) if value is None else value),
        step=step,
        epoch=step // 10,
        metrics=metrics or {},
        config_text=config_text,
    )


def checkpoint_settings(**changes: Any) -> CheckpointConfig:
    """Keep the best by val/loss and the newest; save only when asked to, and while training waits."""
    usual = {"monitor": "val/loss", "save_top_k": 1, "save_last_k": 1, "every_n_epochs": None, "asynchronous": False}
    return replace(parse(raw_config()).checkpoint, **{**usual, **changes})


def manager_of(
    folder: Path, *, is_writer: bool = True, warn: Any = pytest.fail, config_text: str = "a: 1\n", **changes: Any
) -> CheckpointManager:
    """A manager for checkpoints in `folder`, with `checkpoint_settings`."""
    settings = checkpoint_settings(**changes)
    return CheckpointManager(settings, LocalStorage(folder), config_text=config_text, is_writer=is_writer, warn=warn)


def flip(file: Path, bit: int | None = None) -> None:
    """Change one bit of a file: by default one in the middle."""
    content = bytearray(file.read_bytes())
    bit = 4 * len(content) if bit is None else bit
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in folder.glob("step_*"))


def target(folder: Path, pointer: str) -> int | None:
    """The step that `last` or `best` names."""
    path = folder / pointer
    return int(path.readlink().name.removeprefix("step_")) if path.is_symlink() else None
