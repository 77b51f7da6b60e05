"""What a task's step learns of its micro-batch: BatchInfo, with the gather of rows over ranks that it offers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import final

import torch
from torch import Tensor

from framework.data.batching import BatchPlan, share
from framework.distributed.context import Context
from framework.distributed.gather_rows import gather_rows
from framework.errors import ConfigError, TargetError
from framework.strategies.base import Strategy
from framework.types import BatchInfo, Waiting, Window


@final
class BatchInfos:
    """Makes the BatchInfo of each micro-batch of this rank.

    Args:
        plan: How a global batch is split.
        waiting: Learns when this rank waits for others in a gather.
    """

    def __init__(self, context: Context, *, strategy: Strategy, plan: BatchPlan, waiting: Waiting) -> None:
        self._context = context
        self._strategy = strategy
        self._share = strategy.data_share(context)
        self._plan = plan
        self._waiting = waiting
        # False in trials of job=tune, in which each rank makes steps by itself.
        self.exchanges = True
        # If one rank's part of a step is repeated without the others: the position of its first sample.
        self.alone_from: int | None = None

    def of(self, window: Window, *, index: int, step: int, epoch: int) -> BatchInfo:
        """Return the info of micro-batch `index` of a window."""
        micro = window.indices[index]
        if micro.num_samples:
            begin = self._begin(window)
            for earlier in window.indices[:index]:
                begin += earlier.num_samples
            positions = torch.arange(begin, begin + micro.num_samples, device=self._context.device)
        else:
            # A stand-in is gathered from no rank, so any position will do.
            positions = torch.zeros(len(micro.indices), dtype=torch.int64, device=self._context.device)
        return BatchInfo(
            step=step,
            epoch=epoch,
            global_count=window.global_count,
            is_stand_in=micro.num_samples == 0,
            positions=positions,
            gather=partial(self._gather, window=window, positions=positions, num_samples=micro.num_samples),
        )

    def of_window(self, window: Window, *, step: int, epoch: int) -> BatchInfo:
        """Return the info of a strategy's whole part of a window, which all of its micro-batches share."""
        begin = self._begin(window)
        num_samples = self._sizes(window)[self._share.rank]
        positions = torch.arange(begin, begin + num_samples, device=self._context.device)
        gather = partial(self._gather, window=window, positions=positions, num_samples=num_samples)
        return BatchInfo(step, epoch, window.global_count, is_stand_in=False, positions=positions, gather=gather)

    def _sizes(self, window: Window) -> Sequence[int]:
        """Return how many samples of the window each share has."""
        if window.sizes is not None:
            return window.sizes
        world_size = self._share.world_size
        return [len(share(window.global_count, rank=rank, world_size=world_size)) for rank in range(world_size)]

    def _begin(self, window: Window) -> int:
        """Return how many samples of the window are before this rank's."""
        if self.alone_from is not None:
            return self.alone_from
        return sum(self._sizes(window)[: self._share.rank])

    def _gather(self, own: Tensor, *, window: Window, positions: Tensor, num_samples: int) -> Tensor:
        """Return the rows of all samples of the global batch, in its order; see `BatchInfo.gather`."""
        self._check(own, num_rows=len(positions))
        # Drops the rows of a stand-in.
        own = own[:num_samples]
        sizes = self._sizes(window)
        rank = self._share.rank
        if len(sizes) == 1:
            return own
        if not self.exchanges:
            # In place of other ranks' rows, as much memory.
            before = own.new_zeros(sum(sizes[:rank]), *own.shape[1:])
            after = own.new_zeros(sum(sizes) - len(before) - len(own), *own.shape[1:])
            return torch.cat([before, own, after])
        self._waiting.begin_waiting()
        rows = gather_rows(own, sizes=sizes, rank=rank)
        self._waiting.end_waiting()
        return rows

    def _check(self, own: Tensor, *, num_rows: int) -> None:
        """Raise ConfigError if the run can't gather, TargetError for a tensor without a row for each sample."""
        name = type(self._strategy).__name__
        if self.alone_from is not None:
            raise ConfigError(
                "info.gather takes the samples of all processes, and here is only one of them.\n"
                "Leave rank and launcher=in_process out."
            )
        if self._plan.micro_batches > 1:
            raise ConfigError(
                f"info.gather gathers the rows of a whole global batch, and each process computes its part in "
                f"{self._plan.micro_batches} micro-batches, of which the later ones aren't computed yet.\n"
                "Use trainer.accumulate_grad_batches=1."
            )
        if self._strategy.replicas_differ or self._share.world_size != self._context.world_size:
            raise ConfigError(
                f"info.gather needs a strategy with which each process has samples of its own and gradients are "
                f"averaged in every step, and {name} isn't one. Use strategy=ddp, allreduce, butterfly or fsdp."
            )
        shape = tuple(own.shape)
        if own.ndim == 0 or len(own) != num_rows:
            raise TargetError(
                f"info.gather got a tensor of shape {shape} for a micro-batch of {num_rows} samples. Its first "
                "dimension must be the sample: gather two views one after the other, and let the collate function "
                "drop no samples."
            )
