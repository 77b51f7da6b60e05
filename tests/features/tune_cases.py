"""Models, optimizers, data and loggers with which `job=tune` has to cope."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from framework import Datasets
from recipes.toy import INPUTS, OUTPUTS, ToyModel

GROUP_RATES = Path("group_rates.jsonl")
LARGEST = Path("largest_batch")
HOST_BYTES, SAMPLE_BYTES = 200 << 20, 4 << 20


class Limited(ToyModel):
    """On rank 1 more than `most` samples, fewer than `least`, or any of the second model made (`late`) are too many.

    wrong: what it raises isn't about memory. hangs: it waits instead.
    """

    made = 0

    def __init__(
        self, most: int = 1000, least: int = 0, wrong: bool = False, late: bool = False, hangs: bool = False
    ) -> None:
        super().__init__()
        Limited.made += 1  # the second is that of all ranks together
        self.most, self.least = 0 if late and Limited.made == 2 else most, least
        self.wrong, self.hangs = wrong, hangs

    def forward(self, x: Tensor) -> Tensor:
        if len(x) < self.least:
            raise ValueError(f"Expected {self.least} samples or more")
        if os.environ.get("RANK") == "1" and len(x) > self.most:
            if self.hangs:
                time.sleep(60.0)
            if self.wrong:
                raise ValueError("this isn't about memory")
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return super().forward(x)


class Large(nn.Linear):
    """Takes SAMPLE_BYTES for each sample, of a host that has HOST_BYTES left; notes the largest batch it was given."""

    def __init__(self) -> None:
        super().__init__(INPUTS, OUTPUTS)
        from framework.tune import memory

        setattr(memory, "host_available", lambda *_: HOST_BYTES)  # noqa: B010
        self.largest = 0

    def forward(self, x: Tensor) -> Tensor:
        self.largest = max(self.largest, len(x))
        LARGEST.write_text(str(self.largest))
        taken = torch.ones(len(x), SAMPLE_BYTES // 4)
        return super().forward(x) + 0 * taken[:, :1]


def two_rates(parameters: Iterable[Tensor], lr: float, **_: Any) -> torch.optim.Optimizer:
    """Of the second group a quarter of the first; each step's rates become a line of GROUP_RATES."""
    given = list(parameters)
    groups = [{"params": given[:2], "lr": lr}, {"params": given[2:], "lr": lr / 4}]
    made = torch.optim.Adam(groups, lr=lr)

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if os.environ.get("RANK") == "0":
            with GROUP_RATES.open("a") as file:
                file.write(json.dumps([group["lr"] for group in optimizer.param_groups]) + "\n")

    made.register_step_pre_hook(note)
    return made


def without_rate(parameters: Iterable[Tensor], momentum: float, weight_decay: float, nesterov: bool) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.1)


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(torch.ones(8, INPUTS), torch.ones(8, OUTPUTS), strict=True)


def stream(**_: Any) -> Datasets:
    return Datasets(train=Stream())


class BrokenLogger:
    def metrics(self, values: Mapping[str, float], *, step: int, epoch: int) -> None:
        raise OSError("no space")

    def text(self, tag: str, text: str) -> None: ...

    def close(self) -> None:
        raise OSError("no space")
