"""How many bytes tensors, optimizer states and checkpoints take."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from framework.strategies.base import Strategy

_PROBE = (3, 5, 7, 11, 13)
_BYTES_PER_RANK = 16_000  # generators, on the CPU
_REST_BYTES = 12_000  # configuration, manifest, progress, and what files have between tensors


def tensor_bytes(tensors: Iterable[Tensor], dtype: torch.dtype | None = None) -> int:
    """Return the tensors' bytes; dtype: the type to count in, if not their own."""
    return sum(each.numel() * (dtype or each.dtype).itemsize for each in tensors)


def average_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of an average of the tensors, whose floats are float32 or wider."""
    return sum(tensor_bytes([each], average_dtype(each)) for each in tensors)


def average_dtype(tensor: Tensor) -> torch.dtype:
    """Return the type that an average of the tensor has."""
    is_narrow = tensor.is_floating_point() and tensor.itemsize < torch.float32.itemsize
    return torch.float32 if is_narrow else tensor.dtype


def optimizer_state_bytes(make: Callable[[list[nn.Parameter]], Optimizer], parameters: Iterable[nn.Parameter]) -> int:
    """Return the bytes that an optimizer keeps from step to step, found by a step on small parameters.

    Each tensor of its state is assumed to have the size of its parameter, or a fixed one. parameters: on any device.
    Raises what the optimizer raises.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    probes = {_kind(each): nn.Parameter(torch.zeros(_PROBE[: each.dim()], dtype=each.dtype)) for each in trained}
    if not probes:
        return 0
    with torch.random.fork_rng(devices=[]):  # training must draw the same numbers afterwards
        optimizer = make(list(probes.values()))
        for probe in probes.values():
            probe.grad = torch.zeros_like(probe)
        optimizer.step()
    size = 0
    for parameter in trained:
        probe = probes[_kind(parameter)]
        for kept in optimizer.state[probe].values():
            if isinstance(kept, Tensor):
                size += kept.element_size() * (parameter if kept.numel() == probe.numel() else kept).numel()
    return size


def _kind(parameter: Tensor) -> tuple[int, torch.dtype]:
    return min(parameter.dim(), len(_PROBE)), parameter.dtype


def checkpoint_bytes(
    model: nn.Module, optimizer_bytes: int, *, world_size: int, averages: int, strategy: Strategy
) -> int:
    """Return about how many bytes a checkpoint takes on the disk.

    Args:
        model: on any device.
        optimizer_bytes: see `optimizer_state_bytes`.
        averages: how many callbacks evaluate with weights of their own.
        strategy: of the run; some keep every rank's weights, copies of them, or gradients.
    """
    tied_once = {id(each): each for each in model.state_dict(keep_vars=True).values() if isinstance(each, Tensor)}
    weight_bytes = tensor_bytes(tied_once.values())
    averages_bytes = averages * average_bytes(tied_once.values())
    trained_bytes = tensor_bytes(each for each in model.parameters() if each.requires_grad)
    replicas = world_size if strategy.replicas_differ else 1
    own = optimizer_bytes + averages_bytes + (weight_bytes if averages or replicas > 1 else 0)
    costs = strategy.costs()
    kept = (1 + costs.weight_copies) * weight_bytes + world_size * costs.gradients_kept * trained_bytes
    return kept + replicas * own + world_size * _BYTES_PER_RANK + _REST_BYTES
