"""Models of which a rank holds only part: sharded tensor by tensor (torch's DTensor), or cut into stages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard, final

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_LAYOUT = "_stage_layout"


@final
@dataclass(frozen=True)
class StageLayout:
    """What a rank that holds some stages of a model knows about the whole."""

    # Names in the whole state dict.
    names: frozenset[str]
    # Names of all parameters, in order.
    parameters: tuple[str, ...]
    # The number of elements in all of them.
    num_parameters: int
    # If this rank writes its stages to checkpoints. Of the ranks with a copy of them, one does.
    writes: bool
    # If this rank has the last stage.
    has_output: bool


def set_layout(model: nn.Module, layout: StageLayout) -> None:
    setattr(model, _LAYOUT, layout)


def layout_of(model: nn.Module) -> StageLayout | None:
    """Return None for a model that isn't cut into stages."""
    layout: StageLayout | None = vars(model).get(_LAYOUT)
    return layout


def has_output(model: nn.Module) -> bool:
    """Return True if calling the model on this rank gives its output; without the last stage it gives zeros."""
    layout = layout_of(model)
    return layout is None or layout.has_output


def num_parameters(model: nn.Module) -> int:
    """Return the number of elements in all parameters, including those of stages on other ranks."""
    layout = layout_of(model)
    if layout is not None:
        return layout.num_parameters
    return sum(parameter.numel() for parameter in model.parameters())


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Return True for a DTensor, without importing its module, which takes most of a second."""
    # Nearly every value is one of these, and looking for a missing attribute costs microseconds.
    if type(value) is Tensor or type(value) is nn.Parameter:
        return False
    return isinstance(value, Tensor) and hasattr(value, "device_mesh")


def is_model_sharded(model: nn.Module) -> bool:
    """Return True if a forward of the model takes several ranks: it has DTensors, or stages on other ranks."""
    return layout_of(model) is not None or any(is_dtensor(parameter) for parameter in model.parameters())


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the values of all ranks as a plain tensor. Every rank of a DTensor's mesh must call it."""
    if is_dtensor(tensor):
        return tensor.full_tensor()
    return tensor


def by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return the plain tensors, and the DTensors of each mesh, in lists: torch refuses a list of both."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        mesh = tensor.device_mesh if is_dtensor(tensor) else None
        groups.setdefault(mesh, []).append(tensor)
    return list(groups.values())


def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """Return the 2-norm of all values, also of shards on other ranks: the ranks of DTensors' meshes must call it."""
    norms = [full_tensor(nn.utils.get_total_norm(group)) for group in by_mesh(tensors)]
    if len(norms) == 1:
        return norms[0]
    if not norms:
        return torch.zeros(())
    on_one_device = [norm.to(norms[0].device) for norm in norms]
    norm_of_all: Tensor = torch.linalg.vector_norm(torch.stack(on_one_device))
    return norm_of_all


def local_tensor(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor, detached, sharing its memory."""
    if is_dtensor(tensor):
        tensor = tensor.to_local()
    return tensor.detach()


@torch.no_grad()
def shard_like(own: Tensor, full: Tensor) -> Tensor:
    """Return `full`, which every rank has, sharded as `own` is and on its device; as it is if `own` is no DTensor.

    Nothing is exchanged: each rank takes its shard out of its copy.
    """
    if not is_dtensor(own) or is_dtensor(full):
        return full
    from torch.distributed.tensor import distribute_tensor

    shard = distribute_tensor(full, own.device_mesh, own.placements, src_data_rank=None)
    # A copy, as the shard may be a view, which would keep all of `full`.
    return torch.empty_like(own.detach(), dtype=full.dtype).copy_(shard)
