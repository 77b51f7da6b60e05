"""The index of DCP's shards, read without running anything that is in it.

`.metadata` is a pickle, and torch reads it as one: it could call anything. Here a pickle may make the few classes that
torch writes there and no others, none of it can be changed by what is read, and what came out is checked.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from framework.checkpoint.format import SHARDS, SHARDS_INDEX
from framework.errors import CheckpointError

_CLASSES: dict[tuple[str, str], Any] = {
    (each.__module__, each.__qualname__): each
    for each in (
        Metadata,
        MetadataIndex,
        TensorStorageMetadata,
        dcp_metadata.BytesStorageMetadata,  # refused afterwards, with a better reason
        dcp_metadata.TensorProperties,
        dcp_metadata.ChunkStorageMetadata,
        dcp_metadata.StorageMeta,
        dcp_metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo,
        torch.Size,
    )
}
_LAYOUT = ("torch.serialization", "_get_layout")


@final
@dataclass(frozen=True)
class ShardIndex:
    """metadata: DCP's. tensors: shape, type and parts of each tensor by its name."""

    metadata: Metadata
    tensors: Mapping[str, TensorStorageMetadata]


def read_index(directory: Path, *, files: Collection[str]) -> ShardIndex:
    """What the shards of a step directory hold: tensors only, each part within one of `files` (names as in a manifest).

    Raises CheckpointError for anything else.
    """
    try:
        read = _Plain(io.BytesIO((directory / SHARDS_INDEX).read_bytes())).load()
        return _checked(read, files)
    except OSError as error:
        raise CheckpointError(f"{directory / SHARDS_INDEX} can't be read ({error.strerror or error}).") from error
    # Whatever a damaged or forged pickle may raise: it names classes and gives them arguments.
    except Exception as error:
        raise CheckpointError(
            f"The checkpoint {directory} was not read: its {SHARDS_INDEX} isn't an index of plain tensors ({error}).\n"
            "It may be made by another program, or by someone else: such a file can run any code where it is read "
            "without care."
        ) from error


def _checked(read: Any, files: Collection[str]) -> ShardIndex:
    if not isinstance(read, Metadata):
        raise TypeError(f"it holds a {type(read).__name__}")
    tensors: dict[str, TensorStorageMetadata] = {}
    for name, entry in read.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise TypeError(f"{name} is no tensor")
        size: Any = entry.size
        if not isinstance(size, torch.Size) or not isinstance(entry.properties.dtype, torch.dtype):
            raise TypeError(f"{name} has no shape or type")
        tensors[name] = entry
    for key, place in read.storage_data.items():
        if not isinstance(key, MetadataIndex) or not isinstance(place, filesystem._StorageInfo):
            raise TypeError("a part has no place")
        if f"{SHARDS}/{place.relative_path}" not in files:
            raise ValueError(f"it names the file {place.relative_path}, which isn't one of the checkpoint's")
        if place.transform_descriptors:
            raise ValueError("its parts are compressed")
    return ShardIndex(read, tensors)


@final
class _Plain(pickle.Unpickler):
    """Makes what is in _CLASSES; a class itself is never handed out, so that nothing can be written into it."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES:
            return _maker(_CLASSES[module, name])
        if (module, name) == _LAYOUT:
            return _layout
        value = getattr(torch, name, None) if module == "torch" else None
        if isinstance(value, torch.dtype):
            return value
        raise pickle.UnpicklingError(f"{module}.{name} isn't allowed in it")


def _maker(kind: Any) -> type:
    """A class made for this one use, whose instances are those of `kind`."""

    def new(_: type, *args: Any) -> Any:
        # An Enum's member is found by calling it, the others are filled by what follows in the pickle.
        return kind(*args) if args else kind.__new__(kind)

    return type(kind.__name__, (), {"__new__": new})


def _layout(name: str) -> torch.layout:
    if name != "torch.strided":
        raise pickle.UnpicklingError(f"the layout {name} isn't allowed in it")
    return torch.strided
