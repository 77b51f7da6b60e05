"""Checkpoints: what is in one (layout), where they are kept (storage), and when a run saves one: start with `manager`.

`writer` and `reader` write and read one, `retention` decides which ones are deleted, `lookup` finds what a path means.
For sharded models see sharded_state and shards. What is imported here needs no torch until `load` is called.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from framework.checkpoint.layout import PARTS, SHARDS
from framework.checkpoint.lookup import (
    complete_steps,
    find,
    find_damage,
    find_weights,
    manifest_or_none,
    read_manifest,
)
from framework.checkpoint.storage import CheckpointStorage, LocalStorage
from framework.errors import CheckpointError

if TYPE_CHECKING:
    import torch

__all__ = [
    "CheckpointStorage",
    "LocalStorage",
    "complete_steps",
    "find",
    "find_damage",
    "find_weights",
    "load",
    "load_from",
    "manifest_or_none",
    "read_manifest",
]


def load(directory: Path, *, map_location: str | torch.device, parts: Collection[str] = PARTS) -> dict[str, Any]:
    """Return the parts of a step directory (see `find`), each checked for size and checksum before it is read.

    A sharded model is put together, as if it had never been sharded; that needs no process group. Raises
    CheckpointError if a file is missing, damaged, of a newer format, or holds Python objects.

    Args:
        map_location: where the tensors of `model` go. Those of `training` and `generators` stay on the CPU: optimizers
            move their state beside the parameters, step counters on a GPU would cost a wait per step, and generators
            take CPU tensors.
    """
    storage, checkpoint = LocalStorage.of(directory)
    return load_from(storage, checkpoint, map_location=map_location, parts=parts)


def load_from(
    storage: CheckpointStorage, checkpoint: str, *, map_location: str | torch.device, parts: Collection[str] = PARTS
) -> dict[str, Any]:
    """Return the parts of a checkpoint in any storage, as `load` does."""
    from framework.checkpoint.reader import load_files

    manifest = storage.read_manifest(checkpoint)
    if not manifest.is_sharded:
        return load_files(storage, checkpoint, manifest, parts=parts, map_location=map_location)

    if not isinstance(storage, LocalStorage):
        raise CheckpointError(
            f"The checkpoint {storage}/{checkpoint} is of a sharded model, which torch.distributed.checkpoint reads "
            "from paths. Copy it to a disk."
        )
    for file in manifest.files:
        if file.startswith(f"{SHARDS}/"):
            storage.check_file(checkpoint, file, manifest)

    # Takes most of a second to import.
    from framework.checkpoint.sharded_state import load_whole

    return load_whole(storage.folder / checkpoint, manifest, parts=parts, map_location=map_location)
