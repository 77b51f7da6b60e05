"""Checkpoints: what is in one (layout), finding, reading and writing them, and when a run does that (manager).

`find` and what else is imported here need no torch.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from framework.checkpoint.layout import PARTS, SHARDS, read_manifest
from framework.checkpoint.lookup import check_file, complete_steps, find, find_weights

if TYPE_CHECKING:
    import torch

__all__ = ["complete_steps", "find", "find_weights", "load", "read_manifest"]


def load(directory: Path, *, map_location: str | torch.device, parts: Collection[str] = PARTS) -> dict[str, Any]:
    """Return the parts of a step directory (see `find`), each checked for size and checksum before it is read.

    A sharded model is put together, as if it had never been sharded; that needs no process group. Raises
    CheckpointError if a file is missing, damaged, of a newer format, or holds Python objects.

    Args:
        map_location: where the tensors of `model` go. Those of `training` and `generators` stay on the CPU: optimizers
            move their state beside the parameters, step counters on a GPU would cost a wait per step, and generators
            take CPU tensors.
    """
    from framework.checkpoint.reader import load_files

    manifest = read_manifest(directory)
    if not manifest.is_sharded:
        return load_files(directory, manifest, parts=parts, map_location=map_location)
    from framework.checkpoint.sharded_state import load_whole  # takes most of a second to import

    for name in manifest.files:
        if name.startswith(f"{SHARDS}/"):
            check_file(directory, name, manifest)
    return load_whole(directory, manifest, parts=parts, map_location=map_location)
