"""A model and an optimizer with which `job=tune` has to cope."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recipes.toy import ToyModel
from tests.helpers.internals import tune_memory_module


class Limited(ToyModel):
    """On rank 1, more than `most` samples don't fit, and with `late` no samples fit the second model.

    wrong: what it raises isn't about memory.
    """

    made = 0

    def __init__(self, most: int = 1000, wrong: bool = False, late: bool = False) -> None:
        super().__init__()
        # The second attempt is the one of all ranks together.
        Limited.made += 1
        self.most = 0 if late and Limited.made == 2 else most
        self.wrong = wrong

    def forward(self, x: Tensor) -> Tensor:
        if os.environ.get("RANK") == "1" and len(x) > self.most:
            if self.wrong:
                raise ValueError("this isn't about memory")
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return super().forward(x)


class Exchanging(Limited):
    """Every forward exchanges something with the other ranks, as some losses do."""

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        dist.all_reduce(output.detach().sum())
        return output


class Roomy(ToyModel):
    """A sample takes 200 KiB, in small pieces. The first rank has room for 400 MiB, the second one for 300 MiB."""

    def __init__(self) -> None:
        super().__init__()
        room_bytes = (300 if os.environ.get("RANK") == "1" else 400) << 20
        vars(tune_memory_module).update(available_memory=lambda _: room_bytes)
        self.wide = nn.Linear(10, 2_000)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = super().forward(x)
        wide = self.wide(x)
        for _ in range(25):
            wide = wide.tanh()
        return output + wide.mean(dim=1, keepdim=True)


def without_rate(parameters: Iterable[Tensor], momentum: float, weight_decay: float, nesterov: bool) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.1)


class NeedsValues(ToyModel):
    """Its steps can't be forecast."""

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        if not output.abs().max().item() < 1e6:
            raise ValueError("Some values are too large.")
        return output


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        return output


class Blocks(ToyModel):
    """At most 8 samples fit, 32 if the blocks are recomputed, which makes a step so much faster."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        recomputes = "forward" in vars(self.blocks[0])
        if len(x) > (32 if recomputes else 8):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        if not recomputes:
            time.sleep(0.05)
        for block in self.blocks:
            x = block(x)
        return super().forward(x)
