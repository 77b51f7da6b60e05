"""Links between pairs of ranks: round trips, bandwidth at growing sizes, and the clocks of nodes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from framework.distributed.collectives import barrier
from framework.preflight.arithmetic import Budget, Stamps, clock_offset, grows, items
from framework.preflight.lines import Lines, difference, greatest, pattern, under_way
from framework.preflight.pairing import Kind, Pair, doublings, kinds, leader

ROUNDS = 10
"""Round trips of each pair that count; one more before them opens the connection."""
SURELY = 8
"""Steps of each kind that are taken whatever time is left: all there are within a node of up to four processes."""

_BULK_BYTES = tuple(4**exponent for exponent in range(8, 13))  # 64 kiB to 16 MiB
_TRIPS = 3
_LEAST_S = 0.025  # for the larger messages of one link: with less of it links are left out rather than cut short


@dataclass
class Found:
    """links: those of which this rank took the time. clock: its node's, ahead_s of rank 0's and error_s; of the first
    rank of a node alone."""

    links: list[dict[str, Any]] = field(default_factory=list)
    clock: dict[str, float] = field(default_factory=lambda: {"ahead_s": 0.0, "error_s": 0.0})
    faults: list[str] = field(default_factory=list)


def measure_links(lines: Lines, *, max_bytes: int, seconds: float) -> Found:
    """Ten round trips of pair after pair, and what they can carry, as `pairing` has them.

    Takes about `seconds`, in which each kind of links has an equal part: what isn't reached is left out, but for the
    first `SURELY` steps. Every rank must call it.
    """
    found, topology = Found(), lines.context.topology
    with under_way("ping-pong", lines.context):
        _compare_clocks(lines, found)
        budget, all_kinds = Budget(seconds), kinds(topology.nnodes, topology.procs_per_node)
        for number, kind in enumerate(all_kinds):
            share_s = budget.share(len(all_kinds) - number)
            budget.spend(_measure_kind(kind, lines, found, max_bytes=max_bytes, seconds=share_s))
    return found


def _measure_kind(kind: Kind, lines: Lines, found: Found, *, max_bytes: int, seconds: float) -> float:
    """Seconds that it took, the same on every rank."""
    began, spent_s, limit_s = time.perf_counter(), 0.0, max(seconds / kind.num_steps, _LEAST_S)
    for number, pairs in enumerate(kind.steps()):
        if number >= SURELY and spent_s + limit_s > seconds:
            break
        pair = _own(pairs, lines.rank)
        if pair is not None:
            other = sum(pair) - lines.rank
            if lines.rank == leader(pair):
                found.links.append(_lead(other, lines, found, max_bytes=max_bytes, limit_s=limit_s))
            else:
                _follow(other, lines, found)
        (spent_s,) = greatest([time.perf_counter() - began], lines.context)  # which all wait for
    return spent_s


def _own(pairs: list[Pair], rank: int) -> Pair | None:
    return next((pair for pair in pairs if rank in pair), None)


# One link


def _lead(other: int, lines: Lines, found: Found, *, max_bytes: int, limit_s: float) -> dict[str, Any]:
    """The side that takes the time."""
    rounds = [_ask(other, lines, number=number, found=found) for number in range(ROUNDS + 1)][1:]
    trips = [stamps.back - stamps.sent for stamps in rounds]
    points: list[dict[str, Any]] = []
    began = time.perf_counter()
    for size in _bulk_sizes(max_bytes):
        best_s = _best_trip(other, lines, found, size=size, limit_s=limit_s)
        points.append({"bytes": size, "seconds": best_s / 2})
        spent_s = time.perf_counter() - began
        if not grows(best_s, trips=_TRIPS, spent_s=spent_s, round_trip_s=min(trips), limit_s=limit_s):
            break
    _tell(other, lines, size=0)
    return {
        "ranks": sorted((lines.rank, other)),
        "round_trips_s": trips,
        "latency_s": median(trips) / 2,
        "points": points,
    }


def _follow(one: int, lines: Lines, found: Found) -> None:
    """The side that answers, until there is nothing more."""
    _answer(one, lines)
    buffers = None
    while size := int(_hear(one, lines)[0]):
        if buffers is None or buffers.size != size:
            buffers = _Buffers.of(size, lines, other=one)
        buffers.arrived.zero_()
        lines.context.wait_for_devices()
        _tell(one, lines, size=size)  # that all is there; from here on the other takes the time
        lines.receive(buffers.arrived, one)
        lines.send(buffers.given, one)
        _note(difference(buffers.arrived, buffers.expected), one, found)


def _best_trip(other: int, lines: Lines, found: Found, *, size: int, limit_s: float) -> float:
    """Seconds that so many bytes take there and others back: the best of some, for something may have held up one."""
    buffers, times = _Buffers.of(size, lines, other=other), list[float]()
    while len(times) < _TRIPS and sum(times) <= limit_s:
        _tell(other, lines, size=size)
        buffers.arrived.zero_()
        _hear(other, lines)
        lines.context.wait_for_devices()
        began = time.perf_counter()
        lines.send(buffers.given, other)
        lines.receive(buffers.arrived, other)
        lines.context.wait_for_devices()
        times.append(time.perf_counter() - began)
        _note(difference(buffers.arrived, buffers.expected), other, found)
    return min(times)


@dataclass(frozen=True)
class _Buffers:
    """What is sent of one size, and what is to come back."""

    size: int
    given: Tensor
    expected: Tensor
    arrived: Tensor

    @staticmethod
    def of(size: int, lines: Lines, *, other: int) -> _Buffers:
        count = items(size)
        given, expected = (pattern(rank, count, device=lines.pair_device) for rank in (lines.rank, other))
        return _Buffers(size, given, expected, arrived=torch.zeros_like(expected))


def _bulk_sizes(max_bytes: int) -> list[int]:
    return [size for size in _BULK_BYTES if size <= max_bytes] or [max_bytes]


# Round trips


def _compare_clocks(lines: Lines, found: Found) -> None:
    """The first rank of each node with that of another one whose clock is known by then, rank 0's at first."""
    context = lines.context
    procs, nodes = context.topology.procs_per_node, context.topology.nnodes
    for pairs in doublings(nodes):
        pair = _own(pairs, context.node_rank) if context.local_rank == 0 else None
        if pair is not None and pair[0] == context.node_rank:
            other, own = pair[1] * procs, found.clock
            rounds = [_ask(other, lines, number=number, found=found) for number in range(ROUNDS + 1)][1:]
            offset_s, error_s = clock_offset(rounds)
            lines.send(_row(lines, 0.0, own["ahead_s"] + offset_s, own["error_s"] + error_s), other)
        elif pair is not None:
            _answer(pair[0] * procs, lines)
            _, ahead_s, error_s = _hear(pair[0] * procs, lines)
            found.clock = {"ahead_s": ahead_s, "error_s": error_s}
        barrier(context)


def _ask(other: int, lines: Lines, *, number: int, found: Found) -> Stamps:
    """One round trip. The answer is the number and one more, and by the other's clock when it came and was answered."""
    sent, began = time.time(), time.perf_counter()
    lines.send(_row(lines, float(number), 0.0, 0.0), other)
    answer = _empty(lines)
    lines.receive(answer, other)
    lines.context.wait_for_devices()
    back = sent + (time.perf_counter() - began)  # a clock that is put right meanwhile would tell nonsense
    answered, received, left = answer.tolist()
    if answered != number + 1:
        _note(f"to {number} it answered {answered:g} instead of {number + 1}", other, found)
    return Stamps(sent, received, left, back)


def _answer(one: int, lines: Lines) -> None:
    for _ in range(ROUNDS + 1):
        question = _empty(lines)
        lines.receive(question, one)
        received = _now(lines)
        number = float(question[0])
        lines.send(_row(lines, number + 1, received, time.time()), one)


def _tell(other: int, lines: Lines, *, size: int) -> None:
    lines.send(_row(lines, float(size), 0.0, 0.0), other)


def _hear(other: int, lines: Lines) -> list[float]:
    told = _empty(lines)
    lines.receive(told, other)
    values: list[float] = told.tolist()
    return values


def _row(lines: Lines, *values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=lines.pair_device)  # float32 has minutes of this century


def _empty(lines: Lines) -> Tensor:
    return torch.zeros(3, dtype=torch.float64, device=lines.pair_device)


def _now(lines: Lines) -> float:
    lines.context.wait_for_devices()
    return time.time()


def _note(fault: str | None, other: int, found: Found) -> None:
    if fault is not None:
        found.faults.append(f"from rank {other}: {fault}")
