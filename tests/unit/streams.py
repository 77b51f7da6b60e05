"""Streams made of numbers, and a loader of one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from tests.helpers.contexts import CPU, cpu_context
from tests.helpers.internals import Context, EvalLoader, SideChannel, StreamLoader, StreamPlan, plan_batches

Sample = tuple[Tensor, Tensor]


def sample(part: int, number: int, epoch: int) -> Sample:
    """Three inputs and a target; another in every epoch."""
    generator = torch.Generator().manual_seed(1_000_000 * epoch + 1000 * part + number)
    inputs = torch.randn(3, generator=generator)
    return inputs, inputs.sum() + 0.1 * torch.randn((), generator=generator)


class Parts(IterableDataset[Sample]):
    """Parts of these lengths, one after another; each is one shard."""

    def __init__(self, lengths: Sequence[int], *, only: int | None = None, fails_at: int | None = None) -> None:
        self.lengths = lengths
        self.only = only
        self.fails_at = fails_at
        self.epoch = 0
        self.read = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def shard(self, num_shards: int, index: int) -> Parts:
        if num_shards != len(self.lengths):
            raise IndexError(f"there are {len(self.lengths)} parts")
        return type(self)(self.lengths, only=index)

    def __iter__(self) -> Iterator[Sample]:
        for part in range(len(self.lengths)) if self.only is None else (self.only,):
            for number in range(self.lengths[part]):
                if number == self.fails_at:
                    raise OSError("the connection is gone")
                self.read += 1
                yield sample(part, number, self.epoch)


class Stateful(Parts):
    """One part that resumes where it stood, without reading what was before."""

    begin = 0
    position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin = state["position"]

    def __iter__(self) -> Iterator[Sample]:
        self.position = self.begin
        self.begin = 0
        part = self.only or 0
        while self.position < self.lengths[part]:
            self.position += 1
            self.read += 1
            yield sample(part, self.position - 1, self.epoch)


class KeepsItsPosition(Stateful):
    """Returns to the start only at its end, as StatefulDataLoader does."""

    def __iter__(self) -> Iterator[Sample]:
        self.position = self.begin or self.position
        self.begin = 0
        while self.position < self.lengths[self.only or 0]:
            self.position += 1
            yield sample(self.only or 0, self.position - 1, self.epoch)
        self.position = 0

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        self.begin = 0


class Drawing(IterableDataset[tuple[int, float, float]]):
    """Draws its samples from the generator."""

    def __iter__(self) -> Iterator[tuple[int, float, float]]:
        for number in range(10):
            yield number, random.random(), float(torch.rand(()))


def opened(context: Context, *, timeout_s: float = 30.0) -> SideChannel:
    exchange = SideChannel(context, timeout_s=timeout_s)
    exchange.open()
    return exchange


def make_loader(
    dataset: Any,
    context: Context | None = None,
    *,
    exchange: SideChannel | None = None,
    is_sharded: bool = False,
    batch_size: int = 2,
    accumulate: int = 1,
    stops_first: bool = False,
    check_state: Callable[[Any], object] | None = None,
    **reading: Any,
) -> StreamLoader:
    """Return the loader of this rank, or of one rank alone."""
    context = cpu_context() if context is None else context
    world_size = context.world_size
    plan = plan_batches(batch_size=batch_size, global_batch_size=None, world_size=world_size, accumulate=accumulate)
    return StreamLoader(
        dataset,
        plan=StreamPlan("train", plan, context.rank, is_sharded, **{"seed": 5, **reading}),
        device=CPU,
        exchange=SideChannel(context, timeout_s=30.0) if exchange is None else exchange,
        stops_first=stops_first,
        check_state=check_state,
    )


def make_eval_loader(
    dataset: Any, context: Context, *, exchange: SideChannel, is_sharded: bool, batch_size: int, is_even: bool
) -> EvalLoader:
    plan = plan_batches(batch_size=batch_size, global_batch_size=None, world_size=context.world_size, accumulate=1)
    reading = StreamPlan("val", plan, context.rank, is_sharded)
    loader = StreamLoader(dataset, plan=reading, device=CPU, exchange=exchange)
    return EvalLoader(loader, turns=None if is_sharded else batch_size, is_even=is_even)
