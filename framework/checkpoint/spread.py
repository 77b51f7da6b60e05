"""The state of a model and an optimizer that are spread over ranks: taken apart for shards, and put together again.

What is spread goes to the shards under `model.NAME` and `optimizer.PARAMETER.NAME`, on any number of ranks; what isn't
stays plain, with a note of what was taken out of it. Put together whole, it is the state of an unspread run.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.optim import Optimizer

from framework.checkpoint.format import SHARDS, Manifest
from framework.checkpoint.shard_index import ShardIndex, read_index
from framework.checkpoint.staged import own_entries, own_optimizer, state_of_all
from framework.checkpoint.weights import check_fits
from framework.distributed.stages import layout_of
from framework.distributed.tensors import is_spread, spread_like
from framework.errors import CheckpointError

NOTE = "sharded"
"""The entry of `training` that says what the shards hold."""

_MODEL = "model."
_OPTIMIZER = "optimizer."


class Spread(NamedTuple):
    """tensors: live, by their names in the shards. optimizer: its state dict without those of them that are its.

    note: goes into `training` as NOTE, for putting it together: the model's entries that are no tensors, and for each
    tensor of the optimizer [number of the parameter, name in its state, name in the shards].
    """

    tensors: dict[str, Tensor]
    optimizer: dict[str, Any]
    note: dict[str, Any]


def take_apart(model: nn.Module, optimizer: Optimizer) -> Spread:
    """What is spread and what isn't, the same names on every rank. Exchanges nothing.

    Of stages each rank gives what it alone writes, and they exchange what is small: every rank must call it.
    """
    if (layout := layout_of(model)) is not None:
        tensors = {_MODEL + name: value for name, value in model.state_dict().items() if name in layout.written}
        kept, whole, note = state_of_all(model, optimizer, prefix=_OPTIMIZER)
        return Spread(tensors | kept, whole, {"model": {}, "optimizer": note})
    # First: it leaves only the sharded parameters in the model, which are the optimizer's.
    state = model.state_dict()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors = {_MODEL + name: value for name, value in state.items() if isinstance(value, Tensor)}
    rest = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
    plain = optimizer.state_dict()
    parameters = _numbered(optimizer)
    taken: list[list[Any]] = []
    entries: dict[int, dict[str, Any]] = {}
    for number, entry in plain["state"].items():
        entries[number] = dict(entry)
        for name, value in entry.items():
            if is_spread(value):
                key = f"{_OPTIMIZER}{names[id(parameters[number])]}.{name}"
                tensors[key] = entries[number].pop(name)
                taken.append([number, name, key])
    return Spread(tensors, {**plain, "state": entries}, {"model": rest, "optimizer": taken})


def put_together(
    directory: Path,
    manifest: Manifest,
    given: Mapping[str, Any],
    *,
    parts: Collection[str],
    map_location: str | torch.device,
) -> dict[str, Any]:
    """`model`, and `training` with the whole state of the optimizer, where they are among `parts`; with `given`.

    given: the parts that are no shards, `training` at least. map_location: where the model's tensors go. Needs no
    process group. Files are taken to be as they were written. Raises CheckpointError where the index isn't plain.
    """
    index = read_index(directory, files=manifest.files)
    training = dict(given["training"])
    note = training.pop(NOTE)
    together = dict(given)
    if "training" in parts:
        tensors = _empty(index, prefix=_OPTIMIZER)
        _read(directory, index, tensors)
        together["training"] = {**training, "optimizer": _filled(training["optimizer"], tensors, note)}
    if "model" in parts:
        tensors = _empty(index, prefix=_MODEL)
        _read(directory, index, tensors)
        weights = {name.removeprefix(_MODEL): tensor.to(map_location) for name, tensor in tensors.items()}
        together["model"] = {**weights, **note["model"]}
    return together


def load_model(directory: Path, manifest: Manifest, training: Mapping[str, Any], *, model: nn.Module) -> None:
    """Read each rank's part into a model that is spread, on any number of ranks; exchanges nothing.

    training: that part of the checkpoint. Raises CheckpointError where the weights are another model's, before any of
    them is changed.
    """
    rest = training[NOTE]["model"]
    index = read_index(directory, files=manifest.files)
    own = model.state_dict()
    shapes = {
        name.removeprefix(_MODEL): torch.empty(entry.size, device="meta")
        for name, entry in index.tensors.items()
        if name.startswith(_MODEL)
    }
    check_fits(model, own_entries(model, {**shapes, **rest}), source=directory)
    _read(directory, index, {_MODEL + name: value for name, value in own.items() if isinstance(value, Tensor)})
    # They are in the model already; a module may have more to do, as with what is no tensor.
    model.load_state_dict({**own, **rest})


def read_optimizer(
    directory: Path,
    manifest: Manifest,
    training: Mapping[str, Any],
    *,
    optimizer: Optimizer,
    numbers: Mapping[int, int] | None = None,
) -> dict[str, Any]:
    """The state dict for an optimizer of spread parameters, each rank with its part; exchanges nothing.

    training: that part of the checkpoint. numbers: where the optimizer is of some stages, its parameters by their
    numbers in the whole model's. Raises CheckpointError where the index isn't plain.
    """
    note = training[NOTE]
    index = read_index(directory, files=manifest.files)
    parameters = _numbered(optimizer)
    targets = {}
    wanted = {}
    for number, name, key in note["optimizer"]:
        own = number if numbers is None else numbers.get(number)
        if own is not None:
            entry = index.tensors[key]
            targets[key] = _zeros(entry.size, entry.properties.dtype, like=parameters[own])
            wanted[number, name] = targets[key]
    _read(directory, index, targets)
    if numbers is not None:
        return own_optimizer(training["optimizer"], wanted, numbers=numbers, own=optimizer)
    return _filled(training["optimizer"], targets, note)


def spread_optimizer(state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """A whole state dict for an optimizer of spread parameters: each rank, which has all of it, takes its part."""
    parameters = _numbered(optimizer)
    entries = {
        number: {
            # A count of steps is a plain tensor there too.
            name: _spread(value, like=parameters[number]) if isinstance(value, Tensor) and value.ndim else value
            for name, value in entry.items()
        }
        for number, entry in state["state"].items()
    }
    return {**state, "state": entries}


def _numbered(optimizer: Optimizer) -> dict[int, Tensor]:
    """The parameters by the numbers they have in the optimizer's state dict."""
    in_order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return dict(enumerate(in_order))


def _filled(optimizer: Mapping[str, Any], tensors: Mapping[str, Tensor], note: Mapping[str, Any]) -> dict[str, Any]:
    entries = {number: dict(entry) for number, entry in optimizer["state"].items()}
    for number, name, key in note["optimizer"]:
        entries[number][name] = tensors[key]
    return {**optimizer, "state": entries}


def _empty(index: ShardIndex, *, prefix: str) -> dict[str, Tensor]:
    return {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in index.tensors.items()
        if name.startswith(prefix)
    }


def _zeros(shape: torch.Size, dtype: torch.dtype, *, like: Tensor) -> Tensor:
    if shape == like.shape:
        return torch.zeros_like(like.detach(), dtype=dtype)
    return _spread(torch.zeros(shape, dtype=dtype), like=like)


def _spread(value: Tensor, *, like: Tensor) -> Tensor:
    """As the parameter it is of; what has another shape (a mean over rows, say) on every rank as a whole."""
    if value.shape == like.shape:
        return spread_like(like, value.to(like.device))
    if not is_spread(like):
        return value
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh  # type: ignore[attr-defined]
    return DTensor.from_local(value.to(like.device), mesh, [Replicate()] * mesh.ndim, run_check=False)


def _read(directory: Path, index: ShardIndex, targets: Mapping[str, Tensor]) -> None:
    """Fill the targets, plain tensors or DTensors, with this process's parts of them.

    Raises CheckpointError where a shard holds something else than tensors.
    """
    # Torch's parts without `dcp.load`, which would read the index as any pickle, and talk to other ranks.
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(targets), index.metadata, is_coordinator=True)
    reader = FileSystemReader(directory / SHARDS)
    reader.set_up_storage_reader(index.metadata, True)
    try:
        reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"The checkpoint {directory} was not read: a shard holds something else than tensors, which could run any "
            "code.\nSave it anew from the run that made it."
        ) from error
