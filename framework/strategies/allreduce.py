"""Data parallelism without DDP: gradients are averaged after the backward, by all-reduce or a butterfly of pairs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

import torch.distributed as dist
from torch import Tensor, nn

from framework.distributed.butterfly import butterfly_all_reduce_mean
from framework.distributed.context import Context
from framework.distributed.process_group import new_subgroup
from framework.strategies.averaging import MB, SyncedBuffers, average_gradients, begin_all_reduce_mean, broadcast
from framework.strategies.base import NO_CONTEXT, StrategyCosts
from framework.strategies.parameters import check_dense, check_same_change, trained
from framework.strategies.rules import SyncedRules
from framework.types import Waiting


class AllReduce(SyncedBuffers):
    """Average gradients by the backend's all-reduce, after the backward; DDP exchanges while it runs.

    Every rank begins with rank 0's parameters and buffers. A gradient that some ranks lack counts as zeros there; one
    that all lack stays None, so that the optimizer skips its parameter.

    Args:
        broadcast_buffers: Give all ranks rank 0's buffers (BatchNorm's statistics) before the first forward of a step;
            false leaves each rank its own after the start.
        bucket_cap_mb: Gradients are copied to flat tensors of at most this many MiB, each reduced in one call; 0 makes
            a call for each gradient.
    """

    rules = SyncedRules
    # In messages.
    name = "allreduce"

    def __init__(self, *, context: Context, broadcast_buffers: bool = True, bucket_cap_mb: float = 25) -> None:
        super().__init__(context, broadcast_buffers=broadcast_buffers)
        self._is_alone = context.world_size == 1
        self._cap_bytes = bucket_cap_mb * MB
        self._trained: dict[str, nn.Parameter] = {}

    def costs(self) -> StrategyCosts:
        return StrategyCosts(copies_gradients=True)

    def begin_mean(self, values: Tensor) -> dist.Work | None:
        """Start to replace `values` by their mean over ranks; return what to wait for, or None if it is done."""
        return begin_all_reduce_mean(values)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the same module, with rank 0's weights and buffers.

        Raises ConfigError if no parameter is trained, and for an embedding with sparse gradients.
        """
        self._use(model)
        if not self._is_alone:
            broadcast([*model.parameters(), *model.buffers()])
        return model

    def rewrap(self, model: nn.Module, *, changed: Mapping[str, bool]) -> nn.Module:
        """Return the same module; from here on, gradients of the parameters that are trained now are averaged."""
        check_same_change(changed, self._context)
        self._use(model)
        return model

    def accumulate(self, model: nn.Module, *, synchronise: bool) -> AbstractContextManager[Any]:
        """Exchange gradients at the exit, if `synchronise` and without an error; else they add up on each rank."""
        self._begin_forward(model, synchronise=synchronise)
        if synchronise and self._exchanges_gradients():
            return self._exchange_at_exit()
        return NO_CONTEXT

    def observe_waiting(self, model: nn.Module, waiting: Waiting) -> bool:
        """Report each exchange as waiting: what a rank computes for it is little, and the same on all."""
        self._waiting = waiting
        return True

    def _use(self, model: nn.Module) -> None:
        """Note the parameters to train, and check them."""
        self._trained = trained(model, strategy=self.name)
        if self._exchanges_gradients():
            check_dense(model, strategy=self.name)

    def _exchanges_gradients(self) -> bool:
        return not self._is_alone

    @contextmanager
    def _exchange_at_exit(self) -> Iterator[None]:
        yield
        with self._reported_as_waiting():
            average_gradients(self._trained.values(), cap_bytes=self._cap_bytes, begin_mean=self.begin_mean)


@final
class Butterfly(AllReduce):
    """Average gradients by sends and receives between pairs of ranks (`framework.distributed.butterfly`).

    Every rank gets the same bits. The exchange has a group of its own: gloo counts each send as a collective, ranks
    make unequal numbers of them unless their number is a power of two, and the monitor finds the rank that is behind by
    the default group's count.
    """

    name = "butterfly"

    def begin_mean(self, values: Tensor) -> None:
        butterfly_all_reduce_mean(values, group=self.groups[0])

    def wrap(self, model: nn.Module) -> nn.Module:
        super().wrap(model)
        if not self._is_alone:
            self.groups = [new_subgroup([range(self._context.world_size)], self._context)]
        return model
