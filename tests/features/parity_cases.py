"""Models, tasks and optimizers that are the same on any number of processes, and that aren't."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from framework import Datasets, StepOutput


def world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def points(size: int = 45, **_: Any) -> Datasets:
    """Few enough that an epoch's last batch is uneven; the first are elsewhere than the last."""
    x = torch.randn(size, 8, generator=torch.Generator().manual_seed(0)) + torch.arange(size)[:, None] / 16
    return Datasets(train=TensorDataset(x, x[:, :4].tanh()))


# The same


class Plain(nn.Module):
    """Has what makes comparing hard: a module called twice, one never called, tied weights, tuples and dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.mix = nn.Linear(16, 16)
        self.split = Split()
        self.head = nn.Linear(16, 4)
        self.same = self.head
        self.act = nn.ReLU()
        self.drop = nn.Dropout(0.4)
        self.register_buffer("offset", torch.zeros(4))
        self.unused = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.act(self.embed(x)))
        for _ in range(2):
            one, other = self.split(self.mix(x))["parts"]
            x = x + one - other
        output: Tensor = self.same(x) + self.offset
        return output


class Split(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"parts": (x.relu(), 0.1 * x), "size": len(x)}


class SequenceFirst(nn.Module):
    """Sequence, sample, features; then several rows for each sample, place by place; dropout in torch's own ways."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(2, 16, num_layers=2, dropout=0.3)
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.1)
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        size = len(x)
        x, _ = self.recurrent(x.reshape(size, 4, 2).transpose(0, 1))
        x, _ = self.attention(x, x, x)
        output: Tensor = self.out(x.reshape(-1, 16)).reshape(4, size, 4).mean(dim=0)
        return output


class Softmaxed(nn.Module):
    """A softmax doesn't change with what is added to all its values: the gradient of `shift` is rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.full((1,), 0.3))
        self.one = nn.Linear(8, 16)
        self.two = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.two(torch.softmax(self.one(x) + self.shift, dim=1))
        return output


# Models that aren't the same


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


class Around(nn.Module):
    """Two layers and something between them that it does itself."""

    between: Mapping[str, Callable[[Tensor], Tensor]] = {
        "dropout": lambda x: functional.dropout(x, 0.2),
        "mean": lambda x: x - x.mean(dim=0),
        "nothing": torch.tanh,
    }

    def __init__(self, what: str = "nothing") -> None:
        super().__init__()
        self.one = nn.Linear(8, 16)
        self.two = nn.Linear(16, 4)
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.two(self.between[self.what](self.one(x)))
        return output


class Counting(nn.Linear):
    """A running mean that nothing is computed with."""

    def __init__(self) -> None:
        super().__init__(8, 4)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.mean, Tensor)
        self.mean.lerp_(x.mean(dim=0), 0.1)
        return super().forward(x)


class Hooked(nn.Sequential):
    """One value of a gradient among many is off, with several processes."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 5000), nn.Linear(5000, 4))
        off = torch.zeros(5000, 8)
        off[1234, 5] = 0.03 * (world_size() > 1)
        assert isinstance(self[0], nn.Linear)
        self[0].weight.register_hook(lambda gradient: gradient + off * gradient.norm())


class Drawn(Around):
    """Draws its weights itself, otherwise in each process."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.normal_(self.two.weight, generator=torch.Generator().manual_seed(os.getpid()))


# Tasks and optimizers that aren't the same


class Task:
    """A mean over the batch, but for one thing."""

    def __init__(self, what: str) -> None:
        self.what = what

    def training_step(self, model: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor]) -> StepOutput:
        x, y = batch
        if self.what == "input":
            x = x - x.mean(dim=0)
        output = model(x)
        loss = functional.mse_loss(output, y)
        if self.what == "sum":
            loss = loss * len(x)
        return StepOutput(loss, len(x))

    validation_step = training_step


def scaled(parameters: Iterable[Tensor], **_: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3 * world_size())


class Noisy(torch.optim.SGD):
    """Adds noise of its own to weights."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(0.01 * torch.randn_like(parameter))


def noisy(parameters: Iterable[Tensor], **_: Any) -> torch.optim.Optimizer:
    return Noisy(parameters, lr=1e-3)
