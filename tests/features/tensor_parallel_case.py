"""Tensor parallelism of a user's own, by DTensor: the ranks of a copy of the model train on the same samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from framework import Batch, Datasets, StepOutput, Strategy, StrategyCosts
from framework.types import DataShare
from tests.helpers.internals import Context

SIZE = 50
CLASSES = 4
STYLES: dict[str, Any] = {"col": ColwiseParallel, "row": RowwiseParallel}


class TensorParallel(Strategy):
    """Shard layers over neighbouring ranks; with more ranks there are several copies of the model."""

    forward_communicates = True

    def __init__(self, *, context: Context, plan: Mapping[str, str], ranks: int | None = None) -> None:
        self.num_shards = ranks or context.world_size
        self.shard_index = context.rank % self.num_shards
        self.context = context
        self.plan = plan

    def costs(self) -> StrategyCosts:
        return StrategyCosts(num_shards=self.num_shards)

    def data_share(self, context: Context) -> DataShare:
        return DataShare(context.rank // self.num_shards, context.world_size // self.num_shards)

    def wrap(self, model: nn.Module) -> nn.Module:
        shape = (self.context.world_size // self.num_shards, self.num_shards)
        mesh = init_device_mesh(self.context.device.type, shape, mesh_dim_names=("copy", "shard"))
        parallelize_module(model, mesh["shard"], {name: STYLES[kind]() for name, kind in self.plan.items()})
        self.groups = mesh.get_all_groups()
        return model

    @contextmanager
    def accumulate(self, model: nn.Module, *, synchronise: bool) -> Iterator[None]:
        yield
        if not synchronise:
            return
        copies = self.groups[0]
        for parameter in model.parameters():
            assert parameter.grad is not None
            gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            dist.all_reduce(gradient.div_(copies.size()), group=copies)


class Network(nn.Module):
    """Two sharded layers; what is around them is on every rank."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.wide = nn.Linear(8, 16)
        self.narrow = nn.Linear(16, 8)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x).tanh())
        scores: Tensor = self.head(self.dropout(x + self.narrow(self.wide(x).relu())))
        return scores


def points() -> Datasets:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SIZE, 6, generator=generator)
    classes = x[:, :CLASSES].argmax(dim=1).where(torch.rand(SIZE, generator=generator) < 0.8, -100)
    return Datasets(TensorDataset(x, classes), val=TensorDataset(x[:23], classes[:23].clamp(min=0)))


class Weighted:
    """Gives weights; samples of class 0 count twice."""

    def training_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        x, classes = batch
        weights = torch.where(classes < 0, 0.0, 1.0 + (classes == 0))
        losses = cross_entropy(model(x), classes, reduction="none") * weights
        total = weights.sum()
        return StepOutput(losses.sum() / total.clamp(min=1), len(x), {"twice": ((classes == 0).sum(), 1)}, total)

    validation_step = training_step


class Counted:
    """A metric that isn't a mean: how many samples there are."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.number = 0

    def update(self, output: Tensor, target: Tensor) -> None:
        self.number += len(target)

    def state(self) -> int:
        return self.number

    def merge(self, state: int) -> None:
        self.number += state

    def compute(self) -> float:
        return float(self.number)
