"""Bytes that tensors take in memory and in a checkpoint, counted without having the tensors themselves."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from framework.checkpoint.files import BLOCK_BYTES
from framework.checkpoint.format import PARTS, FileFacts, Manifest, encode, part_file
from framework.checkpoint.store import saved_plainly
from framework.seed import generator_states

_MAX_REAL_BYTES = 1 << 30
_PROBE = (3, 5, 7, 11, 13)
_HEADER_BYTES = 200  # what `torch.save` puts between two tensors' data
_GENERATORS_BYTES = 20_000  # of one rank, on the CPU
_REST_BYTES = 92_000  # configuration, manifest, progress, and what each file has of its own
_GPU_GENERATOR_BYTES = 16  # of CUDA's Philox generator: a seed and an offset


@final
@dataclass(frozen=True)
class OptimizerState:
    """What an optimizer keeps after its first step: an entry for each trained parameter, in order, and its settings."""

    entries: list[dict[str, Any]]
    settings: list[dict[str, Any]]

    def tensors(self) -> Iterator[Tensor]:
        for entry in self.entries:
            yield from (value for value in entry.values() if isinstance(value, Tensor))


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def optimizer_state(
    make: Callable[[list[nn.Parameter]], Optimizer], parameters: Iterable[nn.Parameter]
) -> OptimizerState:
    """The state after one step, found by making the optimizer and stepping it.

    On the meta device; with one that refuses that (some read a value, fused ones want a real device), on real zeros
    of each shape in turn. parameters: on the meta device; their gradients are None again on return. Raises what the
    optimizer raises, and MemoryError where a single parameter is too large to try.
    """
    own = list(parameters)
    given = [parameter for parameter in own if parameter.requires_grad]
    try:
        entries = _stepped(make, given)
    except Exception:  # of any optimizer, the user's own too; the other way raises again where that fails as well
        entries = _stepped_by_shape(make, given)
    trained = {id(parameter): entry for parameter, entry in zip(given, entries, strict=True)}
    settings = make(own).state_dict()["param_groups"]
    return OptimizerState([trained[id(each)] for each in own if id(each) in trained], settings)


def _stepped(make: Callable[[list[nn.Parameter]], Optimizer], given: list[nn.Parameter]) -> list[dict[str, Any]]:
    optimizer = make(given)
    try:
        for parameter in given:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    finally:
        for parameter in given:
            parameter.grad = None
    return [dict(optimizer.state[parameter]) for parameter in given]


def _stepped_by_shape(
    make: Callable[[list[nn.Parameter]], Optimizer], given: list[nn.Parameter]
) -> list[dict[str, Any]]:
    """One parameter of each shape at a time, so that memory is needed for one."""
    known: dict[tuple[Any, ...], dict[str, Any]] = {}
    entries = []
    for parameter in given:
        kind = (tuple(parameter.shape), parameter.dtype)
        if kind not in known:
            if tensor_bytes([parameter]) > _MAX_REAL_BYTES:
                raise MemoryError(f"a parameter of shape {kind[0]} is too large to try")
            (known[kind],) = _stepped(make, [nn.Parameter(torch.zeros_like(parameter, device="cpu"))])
        entries.append({name: _meta(value) for name, value in known[kind].items()})
    return entries


def _meta(value: Any) -> Any:
    """A tensor's shape and type without its values; each call gives one of its own."""
    return torch.empty_like(value, device="meta") if isinstance(value, Tensor) else value


def checkpoint_bytes(
    model: nn.Module,
    state: OptimizerState,
    *,
    world_size: int,
    gpus: int,
    averages: int,
    replicas: int = 1,
    anchors: int = 0,
    gradients: int = 0,
) -> int:
    """About how many bytes a checkpoint of `framework.checkpoint` takes on the disk, its configuration aside.

    gpus: of one rank. averages: how many callbacks evaluate with weights of their own. replicas: of how many ranks the
    weights are kept, as they differ. anchors: how many copies of the trained weights the strategy keeps; gradients: how
    many copies of the gradients, of each rank.
    """
    weights = model.state_dict()
    copies = {f"average_{number}": _separate(weights) for number in range(averages)}
    if averages or replicas > 1:
        copies["model"] = _separate(weights)
    own = {
        "optimizer": {
            "state": {number: entry for number, entry in enumerate(state.entries) if entry},
            "param_groups": state.settings,
        },
        **copies,
    }
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    kept = [_separate(trained) for _ in range(anchors + world_size * gradients)]
    training = {**own, "strategy": kept}
    one, three = (saved_bytes([_generators(gpus) for _ in range(ranks)]) for ranks in (1, 3))
    generators = one + (three - one) * (world_size - 1) // 2
    others = (replicas - 1) * saved_bytes(own) if replicas > 1 else 0
    return saved_bytes(weights) + saved_bytes(training) + others + generators + _manifest_bytes()


def rough_checkpoint_bytes(
    weights: Mapping[str, Any],
    make: Callable[[list[nn.Parameter]], Optimizer],
    parameters: Iterable[nn.Parameter],
    *,
    world_size: int,
    averages: int,
    replicas: int = 1,
    anchors: int = 0,
    gradients: int = 0,
) -> int:
    """As `checkpoint_bytes`, within some per cent and in milliseconds: for whoever is about to train.

    make: steps once, on a small real tensor for each number of dimensions, and raises what the optimizer raises. What
    it keeps is taken to be as large as the parameter, or to be small.
    """
    storages = {value.untyped_storage()._cdata: value for value in weights.values() if isinstance(value, Tensor)}
    of_weights = sum(_in_blocks(value.untyped_storage().nbytes()) for value in storages.values())
    given = [parameter for parameter in parameters if parameter.requires_grad]
    probes = {_kind(each): nn.Parameter(torch.zeros(_PROBE[: each.dim()], dtype=each.dtype)) for each in given}
    entries = dict(zip(probes, _stepped(make, list(probes.values())), strict=True)) if probes else {}
    of_optimizer = 0
    for parameter in given:
        kind = _kind(parameter)
        for tensor in (value for value in entries[kind].values() if isinstance(value, Tensor)):
            is_like_it = tensor.numel() == probes[kind].numel()
            count = parameter.numel() if is_like_it else tensor.numel()
            of_optimizer += _in_blocks(count * tensor.element_size())
    own = of_optimizer + (averages + 1) * of_weights if averages or replicas > 1 else of_optimizer
    kept = (1 + anchors) * of_weights + world_size * gradients * tensor_bytes(given)
    return kept + replicas * own + world_size * _GENERATORS_BYTES + _REST_BYTES


def _kind(parameter: Tensor) -> tuple[int, torch.dtype]:
    return min(parameter.dim(), len(_PROBE)), parameter.dtype


def _in_blocks(size_bytes: int) -> int:
    """What a tensor's data takes in a file of a checkpoint, where it begins at a multiple of a block."""
    return -(-(size_bytes + _HEADER_BYTES) // BLOCK_BYTES) * BLOCK_BYTES


def saved_bytes(tree: Any) -> int:
    """The size of the file `torch.save` makes of `tree`, without its data being there.

    A copy in which every storage has one element is really saved, and what the storages lack is added.
    """
    storages: dict[int, tuple[Any, Tensor]] = {}  # with the storage itself: while it lives, nothing else has its number
    lacking = 0

    def small(value: Any) -> Any:
        nonlocal lacking
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            if storage._cdata not in storages:
                stand_in = torch.zeros((), dtype=value.dtype)
                storages[storage._cdata] = storage, stand_in
                lacking += _in_blocks(storage.nbytes()) - _in_blocks(stand_in.element_size())
            return storages[storage._cdata][1].expand(value.shape)
        if isinstance(value, Mapping):
            return type(value)((key, small(each)) for key, each in value.items())  # type: ignore[call-arg]
        if isinstance(value, (list, tuple)):
            return type(value)(small(each) for each in value)
        return value

    file = io.BytesIO()
    with saved_plainly():
        torch.save(small(tree), file)
    return len(file.getbuffer()) + lacking


def _separate(weights: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _meta(value) for name, value in weights.items()}


def _generators(gpus: int) -> dict[str, Any]:
    states = generator_states(())
    states["devices"] = [
        {"kind": "cuda", "state": torch.zeros(_GPU_GENERATOR_BYTES, dtype=torch.uint8)} for _ in range(gpus)
    ]
    return states


def _manifest_bytes() -> int:
    facts = FileFacts(size_bytes=10**6, crc32="0" * 8)
    names = [*map(part_file, PARTS), "config.yaml"]
    manifest = Manifest(
        step=1000,
        epoch=1,
        metrics={"val/loss": 0.5},
        files=dict.fromkeys(names, facts),
        framework_version="0.1.0",
        torch_version=torch.__version__,
    )
    return len(encode(manifest))
