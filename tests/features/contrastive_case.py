"""Losses over the samples of all processes, through `info.gather`, and plain loops that they are compared with."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import IterableDataset, TensorDataset

from framework import Batch, BatchInfo, Datasets, StepInfo, StepOutput

BATCH = 16
SHARDS = (20, 16)
EPOCHS = 2
LR = 0.1
QUEUE = 24
MOMENTUM = 0.9


def pairs(size: int) -> Datasets:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, 6, generator=generator)
    return Datasets(TensorDataset(x, x + 0.1 * torch.randn(size, 6, generator=generator)))


class Shards(IterableDataset[tuple[Tensor, ...]]):
    def __init__(self, rows: Sequence[tuple[Tensor, ...]]) -> None:
        self.rows = rows

    def shard(self, num_shards: int, index: int) -> Shards:
        begin = sum(SHARDS[:index])
        return Shards(self.rows[begin : begin + SHARDS[index]])

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return iter(self.rows)


def shards() -> Datasets:
    dataset = pairs(sum(SHARDS)).train
    return Datasets(Shards([dataset[index] for index in range(len(dataset))]))


class Towers(nn.Module):
    """Two encoders and a temperature, as CLIP has them."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, 4)
        self.other = nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return normalize(self.one(one)), normalize(self.other(other)), self.scale.exp()


class NoValidation:
    def validation_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        raise AssertionError("there is nothing to validate")


def nt_xent(one: Tensor, other: Tensor) -> Tensor:
    """The loss of SimCLR: the second view of each of 2N rows is among the other 2N - 1."""
    rows = torch.cat([one, other])
    scores = rows @ rows.T
    scores = scores.masked_fill(torch.eye(len(rows), dtype=torch.bool), float("-inf"))
    partners = torch.arange(len(rows)).roll(len(one))
    return cross_entropy(scores, partners)


class SimCLR(NoValidation):
    """Every process computes the loss of the whole global batch."""

    def training_step(self, model: nn.Module, batch: Batch, info: BatchInfo) -> StepOutput:
        one, other, _ = model(*batch)
        loss = nt_xent(info.gather(one), info.gather(other))
        return StepOutput(loss, len(one))


def simclr_loop(model: Towers, batches: list[list[Tensor]]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), LR)
    for batch in batches:
        one, other, _ = model(*batch)
        optimizer.zero_grad()
        nt_xent(one, other).backward()
        optimizer.step()


class CLIP(NoValidation):
    """Each process computes the loss of its own samples against those of all."""

    def training_step(self, model: nn.Module, batch: Batch, info: BatchInfo) -> StepOutput:
        one, other, scale = model(*batch)
        of_ones = cross_entropy(scale * one @ info.gather(other).T, info.positions)
        of_others = cross_entropy(scale * other @ info.gather(one).T, info.positions)
        return StepOutput((of_ones + of_others) / 2, len(one))


def clip_loop(model: Towers, batches: list[list[Tensor]]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), LR)
    for batch in batches:
        one, other, scale = model(*batch)
        scores = scale * one @ other.T
        labels = torch.arange(len(one))
        loss = (cross_entropy(scores, labels) + cross_entropy(scores.T, labels)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class MoCo(NoValidation, nn.Module):
    """The queue of keys, and the encoder that makes them, are the task's state: the same in every process."""

    queue: Tensor

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.keys = copy.deepcopy(model).requires_grad_(False)
        self.register_buffer("queue", first_queue())
        self._trained = [model]

    def training_step(self, model: nn.Module, batch: Batch, info: BatchInfo) -> StepOutput:
        queries, _, scale = model(*batch)
        with torch.no_grad():
            _, keys, _ = self.keys(*batch)
        loss = moco_loss(queries, keys, self.queue, scale)
        self.queue = torch.cat([info.gather(keys), self.queue])[:QUEUE]
        return StepOutput(loss, len(queries))

    def on_train_step_end(self, info: StepInfo) -> None:
        follow(self.keys, self._trained[0])


def first_queue() -> Tensor:
    return normalize(torch.randn(QUEUE, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))


def moco_loss(queries: Tensor, keys: Tensor, queue: Tensor, scale: Tensor) -> Tensor:
    positive = (queries * keys).sum(dim=1, keepdim=True)
    scores = scale * torch.cat([positive, queries @ queue.T], dim=1)
    return cross_entropy(scores, torch.zeros(len(queries), dtype=torch.int64))


@torch.no_grad()
def follow(keys: nn.Module, model: nn.Module) -> None:
    for key, parameter in zip(keys.parameters(), model.parameters(), strict=True):
        key.lerp_(parameter, 1 - MOMENTUM)


def moco_loop(model: Towers, batches: list[list[Tensor]]) -> None:
    encoder = copy.deepcopy(model)
    queue = first_queue()
    optimizer = torch.optim.SGD(model.parameters(), LR)
    for batch in batches:
        queries, _, scale = model(*batch)
        keys = encoder(*batch)[1].detach()
        optimizer.zero_grad()
        moco_loss(queries, keys, queue, scale).backward()
        optimizer.step()
        queue = torch.cat([keys, queue])[:QUEUE]
        follow(encoder, model)


LOOPS = {"SimCLR": simclr_loop, "CLIP": clip_loop, "MoCo": moco_loop}


class TwoViewsAtOnce(NoValidation):
    def training_step(self, model: nn.Module, batch: Batch, info: BatchInfo) -> StepOutput:
        rows = torch.cat(model(*batch)[:2])
        return StepOutput(info.gather(rows).sum(), len(batch[0]))
