"""Links between pairs of ranks, one after another so that none has to share: round trips, bandwidth, clocks."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from framework.distributed.collectives import barrier
from framework.preflight.arithmetic import Stamps, clock_offset, items, pairs
from framework.preflight.lines import Lines, difference, pattern, under_way

ROUNDS = 10
"""Round trips of each pair that count; one more before them opens the connection."""

_BULK_BYTES = tuple(4**exponent for exponent in range(8, 13))  # 64 kiB to 16 MiB
_TRIPS = 3
_FURTHER = 4.0  # times as large is the next of them


@dataclass
class Found:
    """links: those that this rank began. clock: ahead_s and error_s, of rank 0's clock; 0 and 0 on rank 0 itself."""

    links: list[dict[str, Any]] = field(default_factory=list)
    clock: dict[str, float] = field(default_factory=lambda: {"ahead_s": 0.0, "error_s": 0.0})
    faults: list[str] = field(default_factory=list)


def measure_links(lines: Lines, *, max_bytes: int, seconds: float) -> Found:
    """Ten round trips between rank 0 and each other, and between neighbours of the ring, and what each pair can carry.

    Takes as long as the small round trips take, and up to `seconds` in all for larger ones. Every rank must call it.
    """
    found, all_pairs = Found(), pairs(lines.ranks)
    with under_way("ping-pong", lines.context):
        for one, other in all_pairs:
            if lines.rank == one:
                found.links.append(_lead(other, lines, found, max_bytes=max_bytes, seconds=seconds / len(all_pairs)))
            elif lines.rank == other:
                _follow(one, lines, found)
            barrier(lines.context)
    return found


def _lead(other: int, lines: Lines, found: Found, *, max_bytes: int, seconds: float) -> dict[str, Any]:
    """The side that takes the time."""
    rounds = [_ask(other, lines, number=number, found=found) for number in range(ROUNDS + 1)][1:]
    trips = [stamps.back - stamps.sent for stamps in rounds]
    best, spent_s = (0, float("inf")), 0.0
    for size in _bulk_sizes(max_bytes):
        for _ in range(_TRIPS):  # the best of them: something else may have held up one
            _tell(other, lines, size=size)
            took_s = _trip(other, lines, size, found)
            spent_s += took_s
            best = max(best, (size, took_s), key=lambda each: each[0] / each[1])
        if spent_s + _TRIPS * _FURTHER * took_s > seconds:
            break
    offset_s, error_s = clock_offset(rounds)
    _tell(other, lines, size=0, ahead_s=offset_s, error_s=error_s)
    return {
        "ranks": [lines.rank, other],
        "round_trips_s": trips,
        "latency_s": median(trips) / 2,
        "bytes_per_s": best[0] / (best[1] / 2),
        "bytes": best[0],
    }


def _follow(one: int, lines: Lines, found: Found) -> None:
    """The side that answers, until there is nothing more."""
    for _ in range(ROUNDS + 1):
        question = _empty(lines)
        lines.receive(question, one)
        received = _now(lines)
        number = float(question[0])
        lines.send(_row(lines, number + 1, received, time.time()), one)
    while True:
        told = _empty(lines)
        lines.receive(told, one)
        size, ahead_s, error_s = told.tolist()
        if size == 0:
            break
        count = items(int(size))
        expected = pattern(one, count, device=lines.pair_device)
        arrived, answer = torch.zeros_like(expected), pattern(lines.rank, count, device=lines.pair_device)
        lines.receive(arrived, one)
        lines.send(answer, one)
        _note(difference(arrived, expected), one, found)
    if one == 0:
        found.clock = {"ahead_s": ahead_s, "error_s": error_s}


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


def _trip(other: int, lines: Lines, size: int, found: Found) -> float:
    """Seconds that so many bytes take there and others back."""
    count = items(size)
    given, expected = (pattern(rank, count, device=lines.pair_device) for rank in (lines.rank, other))
    arrived = torch.zeros_like(expected)
    lines.context.wait_for_devices()
    began = time.perf_counter()
    lines.send(given, other)
    lines.receive(arrived, other)
    lines.context.wait_for_devices()
    took_s = time.perf_counter() - began
    _note(difference(arrived, expected), other, found)
    return took_s


def _bulk_sizes(max_bytes: int) -> list[int]:
    return [size for size in _BULK_BYTES if size <= max_bytes] or [max_bytes]


def _tell(other: int, lines: Lines, *, size: int, ahead_s: float = 0.0, error_s: float = 0.0) -> None:
    lines.send(_row(lines, float(size), ahead_s, error_s), other)


def _row(lines: Lines, *values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=lines.pair_device)  # float32 has minutes of this century


def _empty(lines: Lines) -> torch.Tensor:
    return torch.zeros(3, dtype=torch.float64, device=lines.pair_device)


def _now(lines: Lines) -> float:
    lines.context.wait_for_devices()
    return time.time()


def _note(fault: str | None, other: int, found: Found) -> None:
    if fault is not None:
        found.faults.append(f"from rank {other}: {fault}")
