"""Read a checkpoint into a sharded model, each rank its shards, or put a sharded checkpoint together as a whole.

The index of DCP's shards, `.metadata`, is a pickle, and torch reads it as one: it could call anything. Here a pickle
may make the few classes that torch writes there and no others, and what came out is checked.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.optim import Optimizer

from framework.checkpoint.layout import PARTS, SHARDS, SHARDS_INDEX, Manifest, read_manifest
from framework.checkpoint.reader import load_files, load_weights
from framework.checkpoint.replicas import mean_training
from framework.checkpoint.sharded_writer import MODEL_PREFIX, NOTE, OPTIMIZER_PREFIX, parameters_of, whole_numbers
from framework.distributed.sharded import is_dtensor, layout_of, shard_like
from framework.errors import CheckpointError

# What an index consists of, besides torch's dtypes.
_ALLOWED: dict[tuple[str, str], Any] = {
    (each.__module__, each.__qualname__): each
    for each in (
        Metadata,
        MetadataIndex,
        TensorStorageMetadata,
        dcp_metadata.BytesStorageMetadata,  # refused afterwards, with a better message
        dcp_metadata.TensorProperties,
        dcp_metadata.ChunkStorageMetadata,
        dcp_metadata.StorageMeta,
        dcp_metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo,
        torch.Size,
        torch.serialization._get_layout,
    )
}


def load_sharded_model(directory: Path, model: nn.Module) -> None:
    """Load the weights to evaluate, and only them, into a sharded model. Doesn't communicate.

    Shards are not checked for damage (see `find_damage`). Raises CheckpointError if something can't be read, or the
    weights are another model's.
    """
    manifest = read_manifest(directory)
    if manifest.is_sharded:
        training = load_files(directory, manifest, parts=["training"])["training"]
        _load_shards(directory, read_index(directory, manifest), training, model)
    else:
        weights = load_files(directory, manifest, parts=["model"])["model"]
        load_weights(model, _own_entries(model, weights), source=directory)


def load_sharded(directory: Path, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Load the weights to train on into a sharded model; return `training` and `generators`.

    The optimizer's state in `training` is this rank's, as `optimizer.load_state_dict` takes it. Every rank must call
    it: ranks with stages communicate. Otherwise as `load_sharded_model`.
    """
    manifest = read_manifest(directory)
    numbers = whole_numbers(model, optimizer)
    index: Metadata | None = None
    if manifest.is_sharded:
        state = load_files(directory, manifest, parts=["training", "generators"])
        training = state["training"]
        index = read_index(directory, manifest)
        _load_shards(directory, index, training, model)
    else:
        state = load_files(directory, manifest, parts=PARTS)
        training = mean_training(state["training"])
        load_weights(model, _own_entries(model, training.get("model", state["model"])), source=directory)
    own = _own_optimizer(directory, index, training, optimizer, numbers)
    if layout_of(model) is not None:
        groups = zip(own["param_groups"], optimizer.state_dict()["param_groups"], strict=True)
        own["param_groups"] = [{**saved, "params": here["params"]} for saved, here in groups]
    return {**state, "training": {**training, "optimizer": own}}


def load_whole(
    directory: Path, manifest: Manifest, *, parts: Collection[str], map_location: str | torch.device
) -> dict[str, Any]:
    """Return parts of a sharded checkpoint as if it had never been sharded. Needs no process group.

    map_location: where the model's tensors go.
    """
    index = read_index(directory, manifest)
    # `training` says how the rest goes together.
    found = load_files(directory, manifest, parts=["training", *(part for part in parts if part != "model")])
    note = found["training"].pop(NOTE)
    if "training" in parts:
        tensors = _read_all(directory, index, prefix=OPTIMIZER_PREFIX)
        for number, name, key in note["optimizer"]:
            found["training"]["optimizer"]["state"][number][name] = tensors[key]
    if "model" in parts:
        tensors = _read_all(directory, index, prefix=MODEL_PREFIX)
        weights = {name.removeprefix(MODEL_PREFIX): tensor.to(map_location) for name, tensor in tensors.items()}
        found["model"] = {**weights, **note["model"]}
    return {part: found[part] for part in parts}


def _load_shards(directory: Path, index: Metadata, training: Mapping[str, Any], model: nn.Module) -> None:
    own = model.state_dict()
    saved = {
        name.removeprefix(MODEL_PREFIX): torch.empty(entry.size, device="meta")
        for name, entry in _tensors(index).items()
        if name.startswith(MODEL_PREFIX)
    }
    weights = _own_entries(model, {**saved, **training[NOTE]["model"]})
    # What doesn't fit stays on the meta device, for `load_state_dict` to refuse.
    targets = {
        name: torch.empty_like(own[name]) for name in saved if name in own and own[name].shape == saved[name].shape
    }
    _read(directory, index, {MODEL_PREFIX + name: value for name, value in targets.items()})
    load_weights(model, {**weights, **targets}, source=directory)


def _own_optimizer(
    directory: Path, index: Metadata | None, training: Mapping[str, Any], optimizer: Optimizer, numbers: Sequence[int]
) -> dict[str, Any]:
    """Return the state dict for this rank's optimizer, its groups as they were saved.

    index: of the shards; None for a whole checkpoint. numbers: as `whole_numbers` returns them.
    """
    saved, parameters = training["optimizer"], parameters_of(optimizer)
    own_of = {number: own for own, number in enumerate(numbers)}
    state = {own_of[number]: dict(entry) for number, entry in saved["state"].items() if number in own_of}
    if index is None:
        for own, entry in state.items():
            # A count of steps is a plain tensor in a sharded optimizer too.
            tensors = {name: value for name, value in entry.items() if isinstance(value, Tensor) and value.ndim}
            entry |= {name: _shard(value, like=parameters[own]) for name, value in tensors.items()}
    else:
        targets: dict[str, Tensor] = {}
        written = _tensors(index)
        for number, name, key in training[NOTE]["optimizer"]:
            if number in own_of:
                own, shape, dtype = own_of[number], written[key].size, written[key].properties.dtype
                state[own][name] = targets[key] = _zeros(shape, dtype, like=parameters[own])
        _read(directory, index, targets)
    return {**saved, "state": state}


def _own_entries(model: nn.Module, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what this rank has of a whole state dict, and what no rank has: that is another model's."""
    layout, own = layout_of(model), model.state_dict()
    return {name: value for name, value in given.items() if layout is None or name in own or name not in layout.names}


def _zeros(shape: torch.Size, dtype: torch.dtype, *, like: Tensor) -> Tensor:
    if shape == like.shape:
        return torch.zeros_like(like.detach(), dtype=dtype)
    return _shard(torch.zeros(shape, dtype=dtype), like=like)


def _shard(value: Tensor, *, like: Tensor) -> Tensor:
    """Shard `value` as the parameter it is of; one of another shape (a mean over rows, say) is whole on every rank."""
    if value.shape == like.shape:
        return shard_like(like, value.to(like.device))
    if not is_dtensor(like):
        return value
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh  # type: ignore[attr-defined]
    return DTensor.from_local(value.to(like.device), mesh, [Replicate()] * mesh.ndim, run_check=False)


def _read_all(directory: Path, index: Metadata, *, prefix: str) -> dict[str, Tensor]:
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in _tensors(index).items()
        if name.startswith(prefix)
    }
    _read(directory, index, tensors)
    return tensors


def _read(directory: Path, index: Metadata, targets: Mapping[str, Tensor]) -> None:
    """Fill the targets, plain tensors or DTensors, with this process's shards of them.

    Raises CheckpointError if a shard holds something else than tensors.
    """
    # Torch's own classes without `dcp.load`, which would unpickle the index, and communicate.
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(targets), index, is_coordinator=True)
    reader = FileSystemReader(directory / SHARDS)
    reader.set_up_storage_reader(index, True)
    try:
        reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"The checkpoint {directory} was not read: a shard holds something else than tensors, which could run any "
            "code.\nSave it again from the run that made it."
        ) from error


# The index


def read_index(directory: Path, manifest: Manifest) -> Metadata:
    """Return the index of the shards of a step directory: only tensors, each shard in one of the manifest's files.

    Raises CheckpointError for anything else.
    """
    try:
        index = _IndexUnpickler(io.BytesIO((directory / SHARDS_INDEX).read_bytes())).load()
        _check_index(index, manifest)
    except OSError as error:
        raise CheckpointError(f"{directory / SHARDS_INDEX} can't be read ({error.strerror or error}).") from error
    # Whatever a damaged or forged pickle may raise: it names classes and gives them arguments.
    except Exception as error:
        raise CheckpointError(
            f"The checkpoint {directory} was not read: its {SHARDS_INDEX} isn't an index of plain tensors ({error}).\n"
            "Another program or person may have made it; such a file can run any code if it is unpickled."
        ) from error
    checked: Metadata = index
    return checked


def _tensors(index: Metadata) -> dict[str, TensorStorageMetadata]:
    entries: Any = index.state_dict_metadata  # `_check_index` lets nothing else pass
    return dict(entries)


def _check_index(index: Any, manifest: Manifest) -> None:
    if not isinstance(index, Metadata):
        raise TypeError(f"it holds a {type(index).__name__}")
    for name, entry in index.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise TypeError(f"{name} is no tensor")
        size: Any = entry.size
        if not isinstance(size, torch.Size) or not isinstance(entry.properties.dtype, torch.dtype):
            raise TypeError(f"{name} has no shape or type")
    for key, place in index.storage_data.items():
        if not isinstance(key, MetadataIndex) or not isinstance(place, filesystem._StorageInfo):
            raise TypeError("a shard has no file")
        if f"{SHARDS}/{place.relative_path}" not in manifest.files:
            raise ValueError(f"it names the file {place.relative_path}, which isn't one of the checkpoint's")
        if place.transform_descriptors:
            raise ValueError("its shards are compressed")


@final
class _IndexUnpickler(pickle.Unpickler):
    """Makes objects of _ALLOWED, and never hands out a class itself, so that nothing can be written into it."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _maker(_ALLOWED[module, name])
        value = getattr(torch, name, None) if module == "torch" else None
        if isinstance(value, torch.dtype):
            return value
        raise pickle.UnpicklingError(f"{module}.{name} isn't allowed in it")


def _maker(made: Any) -> type:
    """Return a class made for this one use, whose instances are what `made` makes."""

    def new(_: type, *args: Any) -> Any:
        # An Enum's member is found by calling it, most are filled by what follows in the pickle.
        return made(*args) if args else made.__new__(made)

    return type(made.__name__, (), {"__new__": new})
