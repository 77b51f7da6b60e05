"""Exchanges of growing size: what arrives is compared with what belongs there, then the time is taken."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from framework.distributed.butterfly import MEAN, butterfly_all_reduce
from framework.preflight.arithmetic import items, point, repetitions
from framework.preflight.lines import (
    Lines,
    difference,
    greatest,
    pattern,
    pattern_sum,
    timed,
    under_way,
)

_UNSUPPORTED = re.compile(r"not support|unsupported|not implemented", re.IGNORECASE)
_FURTHER = 4.0  # times as large is the next size
_SMALL_BYTES = 65536  # sizes below are all checked, whatever time is left: by their size they take none
_EMPTY = -1.0  # no pattern has it


@dataclass(frozen=True)
class Trial:
    """Buffers and what is done with them. After it was done once, `arrived` is to be `expected`."""

    act: Callable[[], object]
    arrived: Tensor
    expected: Tensor


@dataclass(frozen=True)
class Exchange:
    """make: a trial of so many values. in_parts: each rank has its part, so their number divides that of values.

    is_ring: as many exchanges as there are ranks follow one another in one `act`.
    """

    name: str
    make: Callable[[Lines, int], Trial]
    in_parts: bool = False
    is_ring: bool = False


def send_recv(lines: Lines, count: int) -> Trial:
    """Around the ring, one rank after the other, each waiting for what it sends to be taken."""
    device, rank, following = lines.pair_device, lines.rank, (lines.rank + 1) % lines.ranks
    expected = pattern(0, count, device=device)
    arrived = torch.full_like(expected, _EMPTY)

    def pass_on() -> None:
        if rank == 0:
            lines.send(expected, following)
        lines.receive(arrived, (rank - 1) % lines.ranks)
        if rank > 0:
            lines.send(arrived, following)

    return Trial(pass_on, arrived, expected)


def broadcast(lines: Lines, count: int) -> Trial:
    expected = pattern(0, count, device=lines.context.device)
    arrived = expected.clone() if lines.rank == 0 else torch.full_like(expected, _EMPTY)
    return Trial(partial(dist.broadcast, arrived, src=0), arrived, expected)


def all_reduce(lines: Lines, count: int) -> Trial:
    device = lines.context.device
    arrived = pattern(lines.rank, count, device=device)
    return Trial(partial(dist.all_reduce, arrived), arrived, pattern_sum(lines.ranks, count, device=device))


def reduce_scatter(lines: Lines, count: int) -> Trial:
    device, share = lines.context.device, count // lines.ranks
    given = pattern(lines.rank, count, device=device)
    arrived = torch.full((share,), _EMPTY, dtype=torch.float32, device=device)
    expected = pattern_sum(lines.ranks, share, device=device, begin=lines.rank * share)
    return Trial(partial(dist.reduce_scatter_tensor, arrived, given), arrived, expected)


def all_gather(lines: Lines, count: int) -> Trial:
    device, share = lines.context.device, count // lines.ranks
    given = pattern(lines.rank, share, device=device)
    arrived = torch.full((count,), _EMPTY, dtype=torch.float32, device=device)
    expected = torch.cat([pattern(rank, share, device=device) for rank in range(lines.ranks)])
    return Trial(partial(dist.all_gather_into_tensor, arrived, given), arrived, expected)


def all_to_all(lines: Lines, count: int) -> Trial:
    device, share = lines.context.device, count // lines.ranks
    given = pattern(lines.rank, count, device=device)
    arrived = torch.full((count,), _EMPTY, dtype=torch.float32, device=device)
    own = partial(pattern, count=share, device=device, begin=lines.rank * share)
    expected = torch.cat([own(rank) for rank in range(lines.ranks)])
    return Trial(partial(dist.all_to_all_single, arrived, given), arrived, expected)


def butterfly(lines: Lines, count: int) -> Trial:
    device = lines.context.device
    arrived = pattern(lines.rank, count, device=device)
    # On the CPU, as where gloo's values are divided: a GPU's quotient may differ from it in the last bit.
    expected = (pattern_sum(lines.ranks, count, device=device).cpu() / lines.ranks).to(device)
    return Trial(partial(butterfly_all_reduce, arrived, op=MEAN, group=lines.pairs), arrived, expected)


EXCHANGES = (
    Exchange("send/recv", send_recv, is_ring=True),
    Exchange("broadcast", broadcast),
    Exchange("all_reduce", all_reduce),
    Exchange("reduce_scatter", reduce_scatter, in_parts=True),
    Exchange("all_gather", all_gather, in_parts=True),
    Exchange("all_to_all", all_to_all, in_parts=True),
    Exchange("butterfly", butterfly),
)


@dataclass(frozen=True)
class Measured:
    """of_all: what preflight.json says of the exchange but its verdict, the same on every rank; faults: of this one.

    spent_s: the same on every rank.
    """

    of_all: dict[str, Any]
    faults: list[str]
    spent_s: float


def measure(exchange: Exchange, lines: Lines, sizes: Sequence[int], *, seconds: float) -> Measured:
    """The exchange at these sizes, the smallest first, as far as `seconds` reach; the small ones anyway.

    Every rank must call it. Raises RunError where another rank doesn't answer. A backend that lacks the exchange is
    said, not raised.
    """
    found: dict[str, Any] = {"name": exchange.name, "unsupported": None, "points": [], "cut_at_bytes": None}
    faults: list[str] = []
    spent_s, target_s = 0.0, seconds / (2 * len(sizes))
    with under_way(exchange.name, lines.context):
        for number, size in enumerate(sizes):
            count = items(size, parts=lines.ranks if exchange.in_parts else 1)
            try:
                first_s, once_s, fault = _once(exchange, lines, count, warms_up=number == 0, target_s=target_s)
            except (RuntimeError, NotImplementedError, ValueError) as error:
                if number or not _UNSUPPORTED.search(str(error)):
                    raise
                return Measured({**found, "unsupported": _first_line(error)}, faults, spent_s)
            faults += [] if fault is None else [f"of {count * 4:,} bytes, {fault}"]
            times, each_s, timed_s = first_s
            found["points"].append(
                point(
                    exchange.name,
                    size_bytes=size,
                    seconds=each_s / (lines.ranks if exchange.is_ring else 1),
                    repetitions=times,
                    ranks=lines.ranks,
                    count=count,
                )
            )
            spent_s += once_s + timed_s
            is_long = size >= _SMALL_BYTES and spent_s + _FURTHER * once_s + target_s > seconds
            if is_long and size != sizes[-1]:
                return Measured({**found, "cut_at_bytes": size}, faults, spent_s)
    return Measured(found, faults, spent_s)


def _once(
    exchange: Exchange, lines: Lines, count: int, *, warms_up: bool, target_s: float
) -> tuple[tuple[int, float, float], float, str | None]:
    """One size: repetitions, seconds of each and of all; seconds of the first with its buffers; what was wrong."""
    began = time.perf_counter()
    trial = exchange.make(lines, count)
    first_s = timed(trial.act, lines.context)
    fault = difference(trial.arrived, trial.expected)
    if warms_up:  # the first of all opens connections
        first_s = timed(trial.act, lines.context)
    first_s, once_s = greatest([first_s, time.perf_counter() - began], lines.context)
    times = repetitions(first_s, target_s=target_s)
    if times == 1:
        return (1, first_s, 0.0), once_s, fault
    (each_s,) = greatest([timed(trial.act, lines.context, repetitions=times)], lines.context)
    return (times, each_s, times * each_s), once_s, fault


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
