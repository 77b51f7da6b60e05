"""Tensors that are spread over ranks (torch's DTensor), told from plain ones without importing what makes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from framework.distributed.stages import layout_of


def is_spread(value: object) -> bool:
    """Whether it is a DTensor: each rank holds a part of it, or a copy that is known to be one."""
    # Its module takes most of a second to import, which a run without any needn't spend.
    if type(value) is Tensor or type(value) is nn.Parameter:  # nearly always; a missing attribute costs microseconds
        return False
    return isinstance(value, Tensor) and hasattr(value, "device_mesh")


def is_model_spread(model: nn.Module) -> bool:
    """Whether parameters of the model are, or whole parts of it, so that its forward is one of several ranks."""
    return layout_of(model) is not None or any(is_spread(parameter) for parameter in model.parameters())


def whole(tensor: Tensor) -> Tensor:
    """The values of all ranks as a plain tensor; a plain one as it is. Every rank of a DTensor's mesh must call it."""
    full: Tensor = tensor.full_tensor() if is_spread(tensor) else tensor  # type: ignore[attr-defined]
    return full


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of it, sharing its memory; a plain one as it is."""
    mine: Tensor = tensor.detach().to_local() if is_spread(tensor) else tensor.detach()  # type: ignore[attr-defined]
    return mine


@torch.no_grad()
def spread_like(own: Tensor, full: Tensor) -> Tensor:
    """`full`, which every rank has, as `own` is: a DTensor on its mesh with its placements, or as it was given.

    Nothing is exchanged: each rank takes its part out of its copy. The part is on the device of `own`.
    """
    if not is_spread(own) or is_spread(full):
        return full
    from torch.distributed.tensor import distribute_tensor

    given: Any = own
    part = distribute_tensor(full, given.device_mesh, given.placements, src_data_rank=None)
    # Copied: the part may be a view, which would keep all of `full`.
    return torch.empty_like(own.detach(), dtype=full.dtype).copy_(part)
