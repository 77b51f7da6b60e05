"""Data parallelism without DDP: every gradient is averaged with `all_reduce` after the backward."""

from __future__ import annotations

from typing import final

import torch.distributed as dist
from torch import Tensor

from framework.strategies.averaged import Averaged


@final
class AllReduce(Averaged):
    """The backend's own all-reduce. Nothing is exchanged while backward runs, as DDP does."""

    def begin_mean(self, values: Tensor) -> dist.Work | None:
        # Before they are added, as DDP does: sums of many may be beyond the greatest number of a 16-bit type.
        values.div_(self._context.world_size)
        return dist.all_reduce(values, async_op=True)
