"""What the checks have in common: the group they use, values that show what was mixed up, agreed numbers, time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from framework.distributed.collectives import barrier
from framework.distributed.context import Context
from framework.distributed.group import side_group
from framework.errors import RunError
from framework.rank_log import logger

_PERIOD = 1009  # of the values; a prime, so that blocks of any usual size that are swapped are seen


@dataclass(frozen=True)
class Lines:
    """How this rank reaches the others.

    pairs: the group for sends and receives, None for the default one; pair_device: where what is sent by it has to be.
    """

    context: Context
    pairs: dist.ProcessGroup | None
    pair_device: torch.device

    @property
    def rank(self) -> int:
        return self.context.rank

    @property
    def ranks(self) -> int:
        return self.context.world_size

    def send(self, values: Tensor, to: int) -> None:
        dist.send(values, to, group=self.pairs)

    def receive(self, values: Tensor, source: int) -> None:
        dist.recv(values, source, group=self.pairs)


@contextmanager
def open_lines(context: Context, *, timeout_s: float) -> Iterator[Lines]:
    """Every rank must enter and leave it, inside the process group, with what a send or receive may take at most.

    Gloo counts sends and receives as collectives, of which each rank then has begun another number; by that number it
    is told who is late. So they go through a group of their own. It is destroyed on the way out, but left to the end of
    the process by an error, for the same reasons as the first group.
    """
    if context.world_size == 1 or context.backend != dist.Backend.GLOO:
        yield Lines(context, pairs=None, pair_device=context.device)
        return
    group = side_group(timeout_s)
    yield Lines(context, pairs=group, pair_device=torch.device("cpu"))  # gloo sends from the CPU alone
    barrier(context)  # nobody is to miss another that it still exchanges with
    dist.destroy_process_group(group)


@contextmanager
def under_way(name: str, context: Context) -> Iterator[None]:
    """Note in this rank's log what is checked, and name it in what torch raises where another rank doesn't answer.

    Raises RunError for a RuntimeError, as all are that torch's collectives raise.
    """
    logger.info("preflight: %s", name)
    try:
        yield
    except RuntimeError as error:
        raise RunError(
            f"Preflight check {name} failed on rank {context.rank} of {context.world_size}: "
            f"{str(error).partition(chr(10))[0]}"
        ) from error


def pattern(rank: int, count: int, *, device: torch.device, begin: int = 0) -> Tensor:
    """The values that `rank` gives, from place `begin` on: float32 whole numbers, so that sums of them are exact."""
    return _tiled(_table(rank), count, begin=begin).to(device)


def pattern_sum(ranks: int, count: int, *, device: torch.device, begin: int = 0) -> Tensor:
    """The sum of the patterns of all ranks."""
    return _tiled(torch.stack([_table(rank) for rank in range(ranks)]).sum(dim=0), count, begin=begin).to(device)


def _table(rank: int) -> Tensor:
    return ((torch.arange(_PERIOD) * 7 + rank * 13 + 1) % _PERIOD).float()


def _tiled(table: Tensor, count: int, *, begin: int) -> Tensor:
    return table.roll(-(begin % _PERIOD)).repeat(-(-count // _PERIOD))[:count]


def difference(arrived: Tensor, expected: Tensor) -> str | None:
    """What is wrong with what arrived, None for nothing."""
    if torch.equal(arrived, expected):
        return None
    wrong = (arrived != expected).nonzero().flatten()  # NaN differs from everything
    first = int(wrong[0])
    return (
        f"{len(wrong):,} of {arrived.numel():,} values are wrong; number {first} is {arrived[first].item():g} "
        f"instead of {expected[first].item():g}"
    )


def greatest(values: Sequence[float], context: Context) -> list[float]:
    """The greatest over ranks of each of these, the same on every rank. Every rank must call it."""
    if context.world_size == 1:
        return list(values)
    found = torch.tensor(values, dtype=torch.float32, device=context.device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return [float(value) for value in found.tolist()]


def timed(act: Callable[[], object], context: Context, *, repetitions: int = 1) -> float:
    """Seconds that `act` takes this rank, the devices' work included, from when all ranks are here."""
    context.wait_for_devices()
    barrier(context)
    context.wait_for_devices()
    began = time.perf_counter()
    for _ in range(repetitions):
        act()
    context.wait_for_devices()
    return (time.perf_counter() - began) / repetitions
