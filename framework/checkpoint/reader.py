"""Read a checkpoint, checked for damage, and load weights into a model, with an error that says how the two differ."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from framework.checkpoint.layout import Manifest, part_file
from framework.checkpoint.storage import CheckpointStorage
from framework.distributed.sharded import shard_like
from framework.errors import CheckpointError


def load_files(
    storage: CheckpointStorage,
    checkpoint: str,
    manifest: Manifest,
    *,
    parts: Collection[str],
    map_location: str | torch.device = "cpu",
) -> dict[str, Any]:
    """Return parts of a checkpoint that are files of their own; `map_location` is where the tensors of `model` go."""
    state = {}
    for part in parts:
        name = part_file(part)
        device = map_location if part == "model" else "cpu"
        storage.check_file(checkpoint, name, manifest)
        try:
            with storage.read(checkpoint, name) as file:
                state[part] = torch.load(file, map_location=device, weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{storage}/{checkpoint}/{name} holds Python objects, which could run any code: {error}"
            ) from error
    return state


def read_training(directory: Path) -> dict[str, Any]:
    """Return the part `training` of a checkpoint that is known to be undamaged; its tensors stay on the disk."""
    training: dict[str, Any] = torch.load(
        directory / part_file("training"), map_location="cpu", weights_only=True, mmap=True
    )
    return training


def load_progress(directory: Path) -> dict[str, int]:
    """Return the progress of a checkpoint that is known to be undamaged, without reading its tensors."""
    progress: dict[str, int] = read_training(directory)["progress"]
    return progress


def load_weights(model: nn.Module, state_dict: Mapping[str, Any], *, source: object) -> None:
    """Copy every tensor of `state_dict` into `model` (unwrapped), onto its devices, and its shard into a sharded one.

    Raises CheckpointError if names or shapes differ; the model is partly changed then.

    Args:
        source: Where the weights come from, for the message.
    """
    own = model.state_dict()
    sharded = dict(state_dict)
    for name, value in state_dict.items():
        tensor = own.get(name)
        if isinstance(value, Tensor) and isinstance(tensor, Tensor) and tensor.shape == value.shape:
            sharded[name] = shard_like(tensor, value)
    try:
        model.load_state_dict(sharded)
    except RuntimeError as error:
        raise CheckpointError(
            f"The weights in {source} don't fit the model. {error}\n"
            "Choose the model they were trained with, or a checkpoint of this model."
        ) from error
