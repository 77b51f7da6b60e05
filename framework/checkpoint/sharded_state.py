"""The state of a sharded model and its optimizer: what of it goes into shards, and how it is loaded.

Shards (see shards.py) are named `model.NAME` and `optimizer.PARAMETER.NAME`. All else is in training.pt, with a note of
what was taken out of it. Of a model in pipeline stages, parameters are numbered as an optimizer of the whole model
would number them. So a checkpoint of any number of ranks is read by any other number.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

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

# The entry of `training` that says what is in the shards.
NOTE = "sharded"

# How the names of shards begin.
_MODEL = "model."
_OPTIMIZER = "optimizer."


def split_state(model: nn.Module, optimizer: Optimizer) -> tuple[Shards, dict[str, Any]]:
    """Return what this rank writes, sharing memory with model and optimizer, and the entries of `training`.

    These are `optimizer`, the state dict of the whole model's optimizer without its tensors that are in the shards, and
    NOTE: the model's entries that are no tensors, and for each tensor of the optimizer [number of the parameter, name
    in its state, name in the shards]. Every rank must call it: ranks with stages communicate.
    """
    layout = layout_of(model)
    # The model's state comes first: taking it leaves only the sharded parameters in the model, which the optimizer has.
    state = model.state_dict()
    tensors: dict[str, Tensor] = {}
    # The model's entries that are no tensors.
    values: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            tensors[_MODEL + name] = value
        else:
            values[name] = value

    split = _split_optimizer(model, optimizer)
    tensors |= split.tensors
    if layout is None:
        own_tensors = {}
        for number, (name, tensor) in enumerate(tensors.items()):
            if _writes(tensor, number):
                own_tensors[name] = tensor
        tensors = own_tensors
        whole = split.plain
    else:
        whole = _merged(_gather(split.plain), groups=split.plain.groups)
        # Another rank has the same stages and writes them.
        if not layout.writes:
            tensors = {}

    state_dict = {"state": dict(sorted(whole.entries.items())), "param_groups": whole.groups}
    note = [[number, name, key] for (number, name), key in sorted(whole.keys.items())]
    return Shards.of(tensors), {"optimizer": state_dict, NOTE: {"model": values, "optimizer": note}}


class _PlainState(NamedTuple):
    """What of an optimizer's state dict isn't in the shards. Parameters have their numbers in the whole model."""

    # By the number of the parameter, its state without the tensors that are in the shards.
    entries: dict[int, dict[str, Any]]
    # By the number of the parameter and the name in its state, the name in the shards.
    keys: dict[tuple[int, str], str]
    groups: list[dict[str, Any]]


class _SplitOptimizer(NamedTuple):
    tensors: dict[str, Tensor]
    plain: _PlainState


def _split_optimizer(model: nn.Module, optimizer: Optimizer) -> _SplitOptimizer:
    """Split this rank's optimizer state. Every rank must call it: ranks with stages communicate."""
    has_stages = layout_of(model) is not None
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = _parameters_of(optimizer)
    numbers = _whole_numbers(model, optimizer)
    state_dict = optimizer.state_dict()

    tensors: dict[str, Tensor] = {}
    entries: dict[int, dict[str, Any]] = {}
    keys: dict[tuple[int, str], str] = {}
    for index, entry in state_dict["state"].items():
        number = numbers[index]
        entries[number] = {}
        for name, value in entry.items():
            is_of_stage = has_stages and isinstance(value, Tensor) and value.ndim > 0
            if is_dtensor(value) or is_of_stage:
                key = f"{_OPTIMIZER}{names[id(parameters[index])]}.{name}"
                keys[number, name] = key
                tensors[key] = value
            else:
                entries[number][name] = value

    groups = []
    for group in state_dict["param_groups"]:
        groups.append({**group, "params": [numbers[index] for index in group["params"]]})
    return _SplitOptimizer(tensors, _PlainState(entries, keys, groups))


def _merged(of_ranks: Sequence[_PlainState], *, groups: Sequence[Mapping[str, Any]]) -> _PlainState:
    """Return what all ranks have together, each of its stages.

    Args:
        groups: This rank's own groups.
    """
    entries: dict[int, dict[str, Any]] = {}
    keys: dict[tuple[int, str], str] = {}
    for state in of_ranks:
        entries |= state.entries
        keys |= state.keys
    whole_groups = []
    for index, group in enumerate(groups):
        numbers = set[int]()
        for state in of_ranks:
            numbers.update(state.groups[index]["params"])
        whole_groups.append({**group, "params": sorted(numbers)})
    return _PlainState(entries, keys, whole_groups)


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
        # `training` has the weights to train on if a callback averages those in `model`.
        weights = _own_entries(model, state["training"].get("model", state["model"]))
    load_weights(model, weights, source=directory)
    if optimizer is None:
        return state

    saved = state["training"]["optimizer"]
    if index is None:
        entries = _own_whole_state(saved, optimizer, numbers)
    else:
        entries = _own_sharded_state(directory, index, state["training"], optimizer, numbers)
    groups = saved["param_groups"]
    if layout_of(model) is not None:
        # The numbers of the parameters are those of this rank's stages.
        own_groups = optimizer.state_dict()["param_groups"]
        groups = []
        for group, own_group in zip(saved["param_groups"], own_groups, strict=True):
            groups.append({**group, "params": own_group["params"]})
    state["training"] = {
        **state["training"],
        "optimizer": {**saved, "state": entries, "param_groups": groups},
    }
    return state


def load_whole(
    directory: Path, manifest: Manifest, *, parts: Collection[str], map_location: str | torch.device
) -> dict[str, Any]:
    """Return parts of a sharded checkpoint as if it had never been sharded. Needs no process group.

    Args:
        map_location: Where the model's tensors go.
    """
    index = read_index(directory, manifest)
    storage, checkpoint = LocalStorage.of(directory)
    # `training` says how the rest goes together.
    state = load_files(storage, checkpoint, manifest, parts={"training", *parts} - {"model"})
    note = state["training"].pop(NOTE)
    if "training" in parts:
        tensors = _read_all(directory, index, prefix=_OPTIMIZER)
        for number, name, key in note["optimizer"]:
            state["training"]["optimizer"]["state"][number][name] = tensors[key]
    if "model" in parts:
        tensors = _read_all(directory, index, prefix=_MODEL)
        weights = {name.removeprefix(_MODEL): tensor.to(map_location) for name, tensor in tensors.items()}
        state["model"] = {**weights, **note["model"]}
    return {part: state[part] for part in parts}


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters in the order of their numbers in the optimizer's state dict."""
    parameters: list[Tensor] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    return parameters


def _whole_numbers(model: nn.Module, optimizer: Optimizer) -> list[int]:
    """Return the numbers that an optimizer of the whole model would give to this optimizer's parameters, in order.

    It counts group by group, in the model's order. Every rank must call it: ranks with stages communicate.
    """
    layout = layout_of(model)
    if layout is None:
        return list(range(len(_parameters_of(optimizer))))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    places = {name: place for place, name in enumerate(layout.parameters)}
    own_groups: list[list[int]] = []
    for group in optimizer.param_groups:
        own_groups.append([places[names[id(parameter)]] for parameter in group["params"]])

    whole_order: list[int] = []
    # Every stage must have the same number of groups, empty ones too.
    for group_of_ranks in zip(*_gather(own_groups), strict=True):
        whole_order += sorted({*chain.from_iterable(group_of_ranks)})
    numbers = {place: number for number, place in enumerate(whole_order)}
    return [numbers[place] for place in chain.from_iterable(own_groups)]


def _writes(tensor: Tensor, number: int) -> bool:
    """Return True if this rank writes the tensor, or its shard of it. Rank 0 writes what isn't sharded.

    Ranks with copies of the same shard, in rows of the mesh, take turns, so that each copies and writes as much.
    """
    if not is_dtensor(tensor):
        return dist.get_rank() == 0
    mesh = tensor.device_mesh
    return mesh.ndim == 1 or number % mesh.size(0) == mesh.get_local_rank(0)


def _gather(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _read_weights(directory: Path, index: Metadata, training: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return this rank's shards of the weights. What doesn't fit is empty, for `load_state_dict` to refuse."""
    own = model.state_dict()
    weights: dict[str, Tensor] = {}
    targets: dict[str, Tensor] = {}
    for key, entry in tensors_of(index, prefix=_MODEL).items():
        name = key.removeprefix(_MODEL)
        if name in own and own[name].shape == entry.size:
            weights[name] = torch.empty_like(own[name])
            targets[key] = weights[name]
        else:
            weights[name] = torch.empty(entry.size, device="meta")
    read_shards(directory, index, targets)
    return _own_entries(model, {**weights, **training[NOTE]["model"]})


def _own_whole_state(
    saved: Mapping[str, Any], optimizer: Optimizer, numbers: Sequence[int]
) -> dict[int, dict[str, Any]]:
    """Return this rank's part of the state of a whole optimizer, by the parameter's number in this rank's optimizer.

    Args:
        saved: the state dict of the whole optimizer.
        numbers: as `_whole_numbers` returns them.
    """
    state: dict[int, dict[str, Any]] = {}
    for own_number, (number, parameter) in enumerate(zip(numbers, _parameters_of(optimizer), strict=True)):
        if number not in saved["state"]:
            continue
        state[own_number] = {}
        for name, value in saved["state"][number].items():
            # A count of steps is a plain tensor in a sharded optimizer too.
            is_sharded = isinstance(value, Tensor) and value.ndim > 0
            state[own_number][name] = _shard(value, like=parameter) if is_sharded else value
    return state


def _own_sharded_state(
    directory: Path, index: Metadata, training: Mapping[str, Any], optimizer: Optimizer, numbers: Sequence[int]
) -> dict[int, dict[str, Any]]:
    """Return the same as `_own_whole_state`, with the tensors that are in the shards."""
    parameters = _parameters_of(optimizer)
    own_numbers = {number: own_number for own_number, number in enumerate(numbers)}
    state: dict[int, dict[str, Any]] = {}
    for number, entry in training["optimizer"]["state"].items():
        if number in own_numbers:
            state[own_numbers[number]] = dict(entry)

    written = tensors_of(index)
    targets: dict[str, Tensor] = {}
    for number, name, key in training[NOTE]["optimizer"]:
        if number in own_numbers:
            own_number = own_numbers[number]
            shard = _zeros(written[key].size, written[key].properties.dtype, like=parameters[own_number])
            state[own_number][name] = shard
            targets[key] = shard
    read_shards(directory, index, targets)
    return state


def _own_entries(model: nn.Module, whole: Mapping[str, Any]) -> dict[str, Any]:
    """Return what this rank has of a whole state dict, and what no rank has: that is another model's."""
    layout = layout_of(model)
    if layout is None:
        return dict(whole)
    own = model.state_dict()
    return {name: value for name, value in whole.items() if name in own or name not in layout.names}


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
    tensors = {}
    for name, entry in tensors_of(index, prefix=prefix).items():
        tensors[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    read_shards(directory, index, tensors)
    return tensors
