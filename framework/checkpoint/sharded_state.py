"""The state of a sharded model and its optimizer: what of it goes into shards, and how it is loaded.

Shards (see shards.py) are named `model.NAME` and `optimizer.PARAMETER.NAME`. All else is in training.pt, with a note of
what was taken out of it. Of a model in pipeline stages, parameters are numbered as an optimizer of the whole model
would number them. So a checkpoint of any number of ranks is read by any other number.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.optim import Optimizer

from framework.checkpoint.layout import PARTS, Manifest
from framework.checkpoint.reader import load_files, load_weights
from framework.checkpoint.replicas import mean_training
from framework.checkpoint.shards import Shards, read_index, read_shards, tensors_of
from framework.checkpoint.storage import LocalStorage
from framework.distributed.sharded import is_dtensor, layout_of, shard_like

NOTE = "sharded"
"""The entry of `training` that says what is in the shards."""

_MODEL, _OPTIMIZER = "model.", "optimizer."


def split_state(model: nn.Module, optimizer: Optimizer) -> tuple[Shards, dict[str, Any]]:
    """Return what this rank writes, sharing memory with model and optimizer, and the entries of `training`.

    These are `optimizer`, the state dict of the whole model's optimizer without its tensors that are in the shards, and
    NOTE: the model's entries that are no tensors, and for each tensor of the optimizer [number of the parameter, name
    in its state, name in the shards]. Every rank must call it: ranks with stages communicate.
    """
    layout = layout_of(model)
    state = model.state_dict()  # first: it leaves only the sharded parameters in the model, which are the optimizer's
    tensors = {_MODEL + name: value for name, value in state.items() if isinstance(value, Tensor)}
    rest = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters, numbers = _parameters_of(optimizer), _whole_numbers(model, optimizer)
    own = optimizer.state_dict()
    entries: dict[int, dict[str, Any]] = {}
    taken: dict[tuple[int, str], str] = {}
    for index, entry in own["state"].items():
        number = numbers[index]
        entries[number] = {}
        for name, value in entry.items():
            if is_dtensor(value) or (layout is not None and isinstance(value, Tensor) and value.ndim):
                key = taken[number, name] = f"{_OPTIMIZER}{names[id(parameters[index])]}.{name}"
                tensors[key] = value
            else:
                entries[number][name] = value
    groups = [{**group, "params": [numbers[index] for index in group["params"]]} for group in own["param_groups"]]
    if layout is None:
        tensors = {name: value for index, (name, value) in enumerate(tensors.items()) if _is_its_turn(value, index)}
    else:
        of_ranks = _gather((entries, taken, groups))
        entries = {number: entry for each, _, _ in of_ranks for number, entry in each.items()}
        taken = {place: key for _, each, _ in of_ranks for place, key in each.items()}
        for index, group in enumerate(groups):
            group["params"] = sorted({number for _, _, each in of_ranks for number in each[index]["params"]})
        if not layout.writes:  # another rank has the same stages and writes them
            tensors = {}
    whole = {"state": dict(sorted(entries.items())), "param_groups": groups}
    note = [[number, name, key] for (number, name), key in sorted(taken.items())]
    return Shards.of(tensors), {"optimizer": whole, NOTE: {"model": rest, "optimizer": note}}


def load_sharded(directory: Path, model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Load weights into a sharded model: with an optimizer those to train on, else those to evaluate.

    With an optimizer, every rank must call it: ranks with stages communicate. Shards are not checked for damage (see
    `find_damage`). Raises CheckpointError if something can't be read, or the weights are another model's.

    Returns:
        With an optimizer `training` and `generators`; the optimizer's state in `training` is this rank's, as
        `optimizer.load_state_dict` takes it. Otherwise nothing to use.
    """
    storage, checkpoint = LocalStorage.of(directory)
    manifest = storage.read_manifest(checkpoint)
    index = read_index(directory, manifest) if manifest.is_sharded else None
    numbers = [] if optimizer is None else _whole_numbers(model, optimizer)
    if index is not None:
        state = load_files(storage, checkpoint, manifest, parts=["training", "generators"])
        weights = _read_weights(directory, index, state["training"], model)
    else:
        parts = ["model"] if optimizer is None else PARTS
        state = load_files(storage, checkpoint, manifest, parts=parts)
        state["training"] = mean_training(state.get("training", {}))
        weights = _own_entries(model, state["training"].get("model", state["model"]))
    load_weights(model, weights, source=directory)
    if optimizer is not None:
        own = _own_optimizer(directory, index, state["training"], optimizer, numbers)
        if layout_of(model) is not None:
            groups = zip(own["param_groups"], optimizer.state_dict()["param_groups"], strict=True)
            own["param_groups"] = [{**saved, "params": here["params"]} for saved, here in groups]
        state["training"] = {**state["training"], "optimizer": own}
    return state


def load_whole(
    directory: Path, manifest: Manifest, *, parts: Collection[str], map_location: str | torch.device
) -> dict[str, Any]:
    """Return parts of a sharded checkpoint as if it had never been sharded. Needs no process group.

    map_location: where the model's tensors go.
    """
    index = read_index(directory, manifest)
    # `training` says how the rest goes together.
    storage, checkpoint = LocalStorage.of(directory)
    found = load_files(storage, checkpoint, manifest, parts={"training", *parts} - {"model"})
    note = found["training"].pop(NOTE)
    if "training" in parts:
        tensors = _read_all(directory, index, prefix=_OPTIMIZER)
        for number, name, key in note["optimizer"]:
            found["training"]["optimizer"]["state"][number][name] = tensors[key]
    if "model" in parts:
        tensors = _read_all(directory, index, prefix=_MODEL)
        weights = {name.removeprefix(_MODEL): tensor.to(map_location) for name, tensor in tensors.items()}
        found["model"] = {**weights, **note["model"]}
    return {part: found[part] for part in parts}


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters in the order of their numbers in the optimizer's state dict."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _whole_numbers(model: nn.Module, optimizer: Optimizer) -> list[int]:
    """Return the numbers that an optimizer of the whole model would give to this optimizer's parameters, in order.

    It counts group by group, in the model's order. Every rank must call it: ranks with stages communicate.
    """
    layout = layout_of(model)
    if layout is None:
        return [*range(len(_parameters_of(optimizer)))]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    places = {name: place for place, name in enumerate(layout.parameters)}
    groups = [[places[names[id(parameter)]] for parameter in group["params"]] for group in optimizer.param_groups]
    of_ranks = _gather(groups)
    # Every stage must have the same number of groups, empty ones too.
    whole = chain.from_iterable(sorted({*chain(*group)}) for group in zip(*of_ranks, strict=True))
    numbers = {place: number for number, place in enumerate(whole)}
    return [numbers[place] for place in chain(*groups)]


def _is_its_turn(tensor: Tensor, index: int) -> bool:
    """Return True if this rank writes the tensor, or its shard of it. Rank 0 writes what isn't sharded.

    Ranks with copies of the same shard, in rows of the mesh, take turns, so that each copies and writes as much.
    """
    if not is_dtensor(tensor):
        return dist.get_rank() == 0
    mesh = tensor.device_mesh
    return mesh.ndim == 1 or index % mesh.size(0) == mesh.get_local_rank(0)


def _gather(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _read_weights(directory: Path, index: Metadata, training: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return this rank's shards of the weights. What doesn't fit is empty, for `load_state_dict` to refuse."""
    own = model.state_dict()
    saved = {
        name.removeprefix(_MODEL): torch.empty(entry.size, device="meta")
        for name, entry in tensors_of(index, prefix=_MODEL).items()
    }
    targets = {
        name: torch.empty_like(own[name]) for name in saved if name in own and own[name].shape == saved[name].shape
    }
    read_shards(directory, index, {_MODEL + name: value for name, value in targets.items()})
    return _own_entries(model, {**saved, **targets, **training[NOTE]["model"]})


def _own_optimizer(
    directory: Path, index: Metadata | None, training: Mapping[str, Any], optimizer: Optimizer, numbers: Sequence[int]
) -> dict[str, Any]:
    """Return the state dict for this rank's optimizer, its groups as they were saved.

    index: of the shards; None for a whole checkpoint. numbers: as `_whole_numbers` returns them.
    """
    saved, parameters = training["optimizer"], _parameters_of(optimizer)
    own_of = {number: own for own, number in enumerate(numbers)}
    state = {own_of[number]: dict(entry) for number, entry in saved["state"].items() if number in own_of}
    if index is None:
        for own, entry in state.items():
            # A count of steps is a plain tensor in a sharded optimizer too.
            tensors = {name: value for name, value in entry.items() if isinstance(value, Tensor) and value.ndim}
            entry |= {name: _shard(value, like=parameters[own]) for name, value in tensors.items()}
    else:
        targets: dict[str, Tensor] = {}
        written = tensors_of(index)
        for number, name, key in training[NOTE]["optimizer"]:
            if number in own_of:
                own, shape, dtype = own_of[number], written[key].size, written[key].properties.dtype
                state[own][name] = targets[key] = _zeros(shape, dtype, like=parameters[own])
        read_shards(directory, index, targets)
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

    mesh = like.device_mesh
    return DTensor.from_local(value.to(like.device), mesh, [Replicate()] * mesh.ndim, run_check=False)


def _read_all(directory: Path, index: Metadata, *, prefix: str) -> dict[str, Tensor]:
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in tensors_of(index, prefix=prefix).items()
    }
    read_shards(directory, index, tensors)
    return tensors
