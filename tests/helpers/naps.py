"""A model, a dataset and a callback in which a rank sleeps, each time it comes to the place that is named."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from framework.types import Datasets

PLACES = ("data", "forward", "backward", "callbacks")
SAMPLES = 4
"""Of a batch: one nap in `data` for so many samples."""


class Naps:
    """seconds: of each sleeping place, `{"data": {1: 0.03}}` for rank 1; `all` for every rank, forward."""

    def __init__(self, seconds: Mapping[str, Mapping[int, float]], *, usual_s: float) -> None:
        rank = int(os.environ.get("RANK", "0"))
        self._own = {place: seconds.get(place, {}).get(rank, 0.0) for place in PLACES}
        self._own["forward"] += usual_s

    def take(self, place: str) -> None:
        if self._own[place]:
            time.sleep(self._own[place])


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, naps: Naps) -> Tensor:
        ctx.naps = naps
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.naps.take("backward")
        return gradients[0], None


class Sleepy(nn.Module):
    """Has buffers, which strategies share before a forward, and layers before and after the nap."""

    def __init__(self, naps: Naps) -> None:
        super().__init__()
        self.naps = naps
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        self.naps.take("forward")
        output: Tensor = self.last(_Back.apply(self.norm(self.first(inputs)), self.naps))
        return output


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Targets have no dimension, or one of a single number."""

    def __init__(self, size: int, naps: Naps, *, wide: bool = False) -> None:
        self.size, self.naps, self.wide, self.asked = size, naps, wide, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.asked += 1
        if self.asked % SAMPLES == 0:
            self.naps.take("data")
        return torch.full((3,), float(index % 7)), torch.full((1,) * self.wide, float(index % 5))


class Observer:
    def __init__(self, naps: Naps) -> None:
        self.naps = naps

    def on_train_step_end(self, report: Any) -> None:
        self.naps.take("callbacks")


# For a recipe: who sleeps where is in the environment, as PLACE:RANK:SECONDS words.


def naps(variable: str = "NAPS") -> Naps:
    seconds: dict[str, dict[int, float]] = {}
    for word in os.environ.get(variable, "").split():
        place, rank, length = word.split(":")
        seconds.setdefault(place, {})[int(rank)] = float(length)
    return Naps(seconds, usual_s=float(os.environ.get(f"{variable}_USUAL", "0")))


def sleepy() -> nn.Module:
    return Sleepy(naps())


def datasets(size: int) -> Datasets:
    return Datasets(train=Samples(size, naps(), wide=True))


def observer() -> Observer:
    return Observer(naps())
