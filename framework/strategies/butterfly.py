"""Data parallelism without DDP and without the backend's collectives: gradients go through a butterfly of pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch.distributed as dist
from torch import Tensor

from framework.distributed.butterfly import MEAN, butterfly_all_reduce
from framework.distributed.group import second_group
from framework.strategies.averaged import Averaged


@final
class Butterfly(Averaged):
    """Sends and receives alone, by `framework.distributed.butterfly`: every rank gets the same bits.

    They go through a group of their own. Gloo counts each as a collective, of which ranks have unequal numbers where
    theirs is no power of two; and by those of the default group it is told who is late.
    """

    def make_groups(self) -> Sequence[dist.ProcessGroup]:
        return [second_group()]

    def begin_mean(self, values: Tensor) -> dist.Work | None:
        butterfly_all_reduce(values, op=MEAN, group=self.groups[0])
        return None
