"""Average gradients in flat tensors, and broadcast parameters and buffers: shared by the strategies.

Tensors are exchanged in a few flat ones: a small collective costs about a millisecond over gloo, however small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from framework.distributed.collectives import gather_to_all
from framework.distributed.context import Context
from framework.strategies.base import Strategy
from framework.types import Waiting

MB = 1 << 20
# The size that DDP uses for the broadcast at the start.
_BROADCAST_CAP_BYTES = 250 * MB


class _Exchange(NamedTuple):
    """A flat tensor of gradients that is being averaged, and behind them a flag for each."""

    parameters: list[Tensor]
    gradients: list[Tensor]
    # The indices of the parameters that had no gradient on this rank.
    missing: list[int]
    flat: Tensor
    # What to wait for; None if it is done.
    work: dist.Work | None


def group_by_dtype(tensors: Iterable[Tensor], *, cap_bytes: float) -> Iterator[list[Tensor]]:
    """Yield lists of one dtype and device, in order, of at most `cap_bytes` unless a single tensor is larger."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for kind in kinds.values():
        group: list[Tensor] = []
        size = 0
        for tensor in kind:
            if group and size + tensor.nbytes > cap_bytes:
                yield group
                group = []
                size = 0
            group.append(tensor)
            size += tensor.nbytes
        yield group


def begin_all_reduce_mean(values: Tensor, *, group: dist.ProcessGroup | None = None) -> dist.Work | None:
    """Start to replace `values` by their mean over the ranks of `group` (None: of the run)."""
    # Divided first, as DDP does: a sum over many ranks may exceed the range of a 16-bit type.
    values.div_(dist.get_world_size(group))
    return dist.all_reduce(values, group=group, async_op=True)


@torch.no_grad()
def average_gradients(
    parameters: Iterable[Tensor],
    *,
    cap_bytes: float,
    begin_mean: Callable[[Tensor], dist.Work | None] = begin_all_reduce_mean,
) -> None:
    """Replace dense gradients by their means over ranks, in flat tensors of at most `cap_bytes`.

    A gradient that some ranks lack counts as zeros there; one that all lack stays None. Behind the gradients of a flat
    tensor is a flag for each. So only a rank that lacks one reads flags, which waits for the device.

    Args:
        begin_mean: Starts to replace a flat tensor by its mean; returns what to wait for, or None if it is done.
    """
    exchanges = []
    for group in group_by_dtype(parameters, cap_bytes=cap_bytes):
        missing = [number for number, parameter in enumerate(group) if parameter.grad is None]
        flags = torch.ones(len(group), dtype=group[0].dtype, device=group[0].device)
        for number in missing:
            group[number].grad = torch.zeros_like(group[number])
            flags[number] = 0
        gradients = [parameter.grad for parameter in group if parameter.grad is not None]
        parts = [gradient.reshape(-1) for gradient in gradients]
        flat = torch.cat([*parts, flags])
        exchanges.append(_Exchange(group, gradients, missing, flat, begin_mean(flat)))

    for exchange in exchanges:
        if exchange.work is not None:
            exchange.work.wait()
        gradients = exchange.gradients
        sizes = [gradient.numel() for gradient in gradients]
        *means, flags = exchange.flat.split([*sizes, len(gradients)])
        shaped_means = [mean.view_as(gradient) for mean, gradient in zip(means, gradients, strict=True)]
        torch._foreach_copy_(gradients, shaped_means)
        if exchange.missing:
            # The share of ranks that had a gradient. Reading it waits for the device.
            has_gradient = flags.tolist()
            for number in exchange.missing:
                if has_gradient[number] == 0:
                    exchange.parameters[number].grad = None


@torch.no_grad()
def broadcast(tensors: Iterable[Tensor], *, group: dist.ProcessGroup | None = None, source: int = 0) -> None:
    """Give all ranks of `group` (None: of the run) rank `source`'s values, in place. Every rank of it must call it."""
    for bucket in group_by_dtype(tensors, cap_bytes=_BROADCAST_CAP_BYTES):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        dist.broadcast(flat, group=group, group_src=source)
        parts = flat.split([tensor.numel() for tensor in bucket])
        values = [part.view_as(tensor) for part, tensor in zip(parts, bucket, strict=True)]
        torch._foreach_copy_(bucket, values)


class SyncedBuffers(Strategy):
    """Base of strategies with `broadcast_buffers`: averaging gradients doesn't keep BatchNorm's statistics equal.

    Args:
        broadcast_buffers: True gives all ranks rank 0's buffers before the first forward of a step; False leaves each
            rank its own.
    """

    def __init__(self, context: Context, *, broadcast_buffers: bool) -> None:
        self._context = context
        self._broadcasts_buffers = broadcast_buffers and context.world_size > 1
        self.buffers_differ = not broadcast_buffers and context.world_size > 1
        # If the next forward is the first of a step.
        self._begins_step = True
        self._waiting: Waiting | None = None

    def broadcast_buffers(self, model: nn.Module, *, source: int) -> None:
        # Rank 0's buffers come with the next step anyway.
        if self._broadcasts_buffers and source != 0:
            self._broadcast(model, source=source)

    def before_evaluation(self, model: nn.Module) -> None:
        if self._broadcasts_buffers:
            broadcast(self.unwrap(model).buffers())

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return the buffers of all ranks, if they may differ."""
        if self._broadcasts_buffers:
            return {}
        own = {name: buffer.cpu() for name, buffer in self.unwrap(model).named_buffers()}
        return {"buffers": gather_to_all(own, self._context)}

    @torch.no_grad()
    def load_state_dict(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Restore this rank's buffers; those of another number of ranks are ignored."""
        saved = state.get("buffers", [])
        if not self._broadcasts_buffers and len(saved) == self._context.world_size:
            own = dict(self.unwrap(model).named_buffers())
            for name, value in saved[self._context.rank].items():
                own[name].copy_(value)

    def _begin_forward(self, model: nn.Module, *, synchronise: bool) -> None:
        """Give all ranks rank 0's buffers if this is the first forward of a step."""
        if self._begins_step and self._broadcasts_buffers:
            self._broadcast(model)
        self._begins_step = synchronise

    def _broadcast(self, model: nn.Module, *, source: int = 0) -> None:
        # Listed each time, since a model may replace them.
        buffers = list(self.unwrap(model).buffers())
        if buffers:
            with self._reported_as_waiting():
                broadcast(buffers, source=source)

    @contextmanager
    def _reported_as_waiting(self) -> Iterator[None]:
        if self._waiting is not None:
            self._waiting.begin_waiting()
        yield
        if self._waiting is not None:
            self._waiting.end_waiting()
