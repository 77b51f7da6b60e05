"""Average gradients in flat buckets, and broadcast parameters and buffers: shared by the strategies.

Tensors are exchanged in a few flat ones: a small collective costs about a millisecond over gloo, however small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from framework.distributed.collectives import gather_to_all
from framework.distributed.context import Context
from framework.strategies.base import Strategy
from framework.strategies.parameters import check_dense, trained
from framework.types import Waiting

MB = 1 << 20
_BROADCAST_CAP_BYTES = 250 * MB  # DDP's, for a model at the start


def group_by_dtype(tensors: Iterable[Tensor], *, cap_bytes: float = math.inf) -> Iterator[list[Tensor]]:
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
                group, size = [], 0
            group.append(tensor)
            size += tensor.nbytes
        yield group


@final
class Bucket:
    """The gradients of some parameters, of one type and device, in one flat tensor with the same layout on all ranks.

    Behind the gradients is a flag for each, which is 0 after the reduction if no rank has that gradient. So the ranks
    agree on it without another collective, and only a rank that lacks one reads flags, which waits for the device.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)
        sizes = [parameter.numel() for parameter in self.parameters]
        first = self.parameters[0]
        self.flat = torch.zeros(sum(sizes) + len(sizes), dtype=first.dtype, device=first.device)
        *parts, self._flags = self.flat.split([*sizes, len(sizes)])
        self._views = [
            part.as_strided(parameter.shape, torch.empty_like(parameter, device="meta").stride())
            for part, parameter in zip(parts, self.parameters, strict=True)
        ]
        self._missing: list[int] = []

    @torch.no_grad()
    def fill(self) -> None:
        """Move the gradients into the flat tensor, zeros for those this rank lacks. Raises RuntimeError if sparse."""
        gradients = [parameter.grad for parameter in self.parameters]
        views = [view for view, gradient in zip(self._views, gradients, strict=True) if gradient is not None]
        self._missing = [number for number, gradient in enumerate(gradients) if gradient is None]
        self._flags.fill_(1.0)
        for number in self._missing:
            self._views[number].zero_()
            self._flags[number] = 0.0
        if views:
            torch._foreach_copy_(views, [gradient for gradient in gradients if gradient is not None])
        for parameter, view in zip(self.parameters, self._views, strict=True):
            if parameter.grad is not None:
                parameter.grad = view

    def set_missing_gradients(self) -> None:
        """After the reduction, set the gradients that only other ranks had."""
        flags = self._flags.tolist() if self._missing else []
        for number in self._missing:
            if flags[number] != 0:
                self.parameters[number].grad = self._views[number]


def gradient_buckets(model: nn.Module, *, strategy: str, cap_bytes: float) -> list[Bucket]:
    """Return buckets for the trained parameters. Raises ConfigError if there are none, and for sparse gradients."""
    parameters = trained(model, strategy=strategy)
    check_dense(model, strategy=strategy)
    return [Bucket(group) for group in group_by_dtype(parameters, cap_bytes=cap_bytes)]


def average(buckets: Iterable[Bucket], begin_mean: Callable[[Tensor], dist.Work | None]) -> None:
    """Replace every gradient by the mean over ranks; the next bucket is filled while one is exchanged.

    begin_mean: Starts to replace a flat tensor by its mean over ranks; returns what to wait for, or None if it is done.
    """
    started = []
    for bucket in buckets:
        bucket.fill()
        started.append((bucket, begin_mean(bucket.flat)))
    for bucket, work in started:
        if work is not None:
            work.wait()
        bucket.set_missing_gradients()


def begin_all_reduce_mean(values: Tensor, *, group: dist.ProcessGroup | None = None) -> dist.Work | None:
    """Start to replace `values` by their mean over the ranks of `group` (None: of the run)."""
    # Divided first, as DDP does: a sum over many ranks may exceed the range of a 16-bit type.
    values.div_(dist.get_world_size(group))
    return dist.all_reduce(values, group=group, async_op=True)


@torch.no_grad()
def broadcast(tensors: Iterable[Tensor], *, group: dist.ProcessGroup | None = None, source: int = 0) -> None:
    """Give all ranks of `group` (None: of the run) rank `source`'s values, in place. Every rank of it must call it."""
    for each in group_by_dtype(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in each])
        dist.broadcast(flat, group=group, group_src=source)
        for tensor, part in zip(each, flat.split([tensor.numel() for tensor in each]), strict=True):
            tensor.copy_(part.view_as(tensor))


def broadcast_model(model: nn.Module, *, group: dist.ProcessGroup | None = None) -> None:
    """Give all ranks the first one's parameters and buffers, as DDP does at the start. Every rank must call it."""
    for each in group_by_dtype([*model.parameters(), *model.buffers()], cap_bytes=_BROADCAST_CAP_BYTES):
        broadcast(each, group=group)


class SyncedBuffers(Strategy):
    """Base of strategies with `broadcast_buffers`: averaging gradients doesn't keep BatchNorm's statistics equal.

    broadcast_buffers: True gives all ranks rank 0's buffers before the first forward of a step; False leaves each rank
        its own.
    """

    def __init__(self, context: Context, *, broadcast_buffers: bool) -> None:
        self._context = context
        self._broadcasts_buffers = broadcast_buffers and context.world_size > 1
        self.buffers_differ = not broadcast_buffers and context.world_size > 1
        self._has_buffers = True
        self._begins_step = True  # the next forward is the first of a step
        self._waiting: Waiting | None = None

    def broadcast_buffers(self, model: nn.Module, *, source: int) -> None:
        if self._broadcasts_buffers and source:  # rank 0's come with the next step
            self._broadcast(model, source=source)

    def before_evaluation(self, model: nn.Module) -> None:
        if self._broadcasts_buffers:
            broadcast(self.unwrap(model).buffers())

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return the buffers of all ranks, if they may differ."""
        if self._broadcasts_buffers:
            return {}
        own = {name: buffer.cpu() for name, buffer in self.unwrap(model).named_buffers()}
        return {"buffers": list(gather_to_all(own, self._context))}

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
        if self._begins_step and self._broadcasts_buffers and self._has_buffers:
            self._broadcast(model)
        self._begins_step = synchronise

    def _broadcast(self, model: nn.Module, *, source: int = 0) -> None:
        with self._reported_as_waiting():
            broadcast(self.unwrap(model).buffers(), source=source)  # listed each time: a model may replace them

    @contextmanager
    def _reported_as_waiting(self) -> Iterator[None]:
        if self._waiting is not None:
            self._waiting.begin_waiting()
        yield
        if self._waiting is not None:
            self._waiting.end_waiting()
