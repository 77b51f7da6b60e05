"""A contrastive loss over the samples of all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn.functional import cross_entropy, pad
from torch.utils.data import TensorDataset

from framework import Batch, BatchInfo, Datasets, StepOutput

SIZE = 65


def pairs() -> Datasets:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SIZE, 6, generator=generator)
    return Datasets(TensorDataset(x, x + 0.1 * torch.randn(SIZE, 6, generator=generator)))


class Contrastive:
    """Find the second view of each sample among those of the global batch."""

    def training_step(self, model: nn.Module, batch: Batch, info: BatchInfo) -> StepOutput:
        one, other = model(torch.cat(list(batch))).chunk(2)
        if info.is_stand_in:
            one = one[:0]
            other = other[:0]
        candidates, begin = gathered(other)
        assert len(candidates) == info.global_count
        places = begin + torch.arange(len(one))
        if info.is_stand_in:
            return StepOutput(candidates.sum() * 0, 1)
        return StepOutput(cross_entropy(one @ candidates.T, places), len(one))

    def validation_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        raise AssertionError("there is nothing to validate")


def gathered(own: Tensor) -> tuple[Tensor, int]:
    """Return the rows of all ranks, with their gradients, and how many are before this rank's."""
    if not dist.is_initialized():
        return own, 0
    sizes = [torch.zeros((), dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor(len(own)))
    largest = int(max(sizes))
    rows = all_gather(pad(own, (0, 0, 0, largest - len(own))))
    whole = torch.cat([part[: int(size)] for part, size in zip(rows, sizes, strict=True)])
    return whole, int(sum(sizes[: dist.get_rank()]))
