"""Data parallelism without DDP and without the backend's collectives: gradients go through a butterfly of pairs."""

from __future__ import annotations

from typing import final

import torch.distributed as dist
from torch import Tensor

from framework.distributed.butterfly import MEAN, butterfly_all_reduce
from framework.strategies.averaged import Averaged


@final
class Butterfly(Averaged):
    """Sends and receives alone, by `framework.distributed.butterfly`: every rank gets the same bits."""

    def begin_mean(self, values: Tensor) -> dist.Work | None:
        butterfly_all_reduce(values, op=MEAN)
        return None
