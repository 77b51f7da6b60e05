"""How long a step takes at least: each operator at the speed of the device's arithmetic or of its memory.

S. Williams, A. Waterman and D. Patterson, Roofline: an insightful visual performance model, CACM 52 (2009).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from framework.jobs.plan.trace import Operator, Trace

_MATMUL_SIZE = 768
_COPIED_BYTES = 64 << 20
_ROUNDS = 5


class Speed(NamedTuple):
    """What a device does in a second."""

    # Of matrix products in the type of their result.
    flops_per_s: Callable[[torch.dtype | None], float]
    # Read and written.
    bytes_per_s: float


class Bounds(NamedTuple):
    """The least seconds of a step's operators by what bounds them."""

    compute_s: float
    memory_s: float
    # Of all FLOPs at the device's peak.
    at_peak_s: float


def bounds_of(trace: Trace, speed: Speed) -> Bounds:
    """Return the time of a traced step."""
    compute_s = 0.0
    memory_s = 0.0
    at_peak_s = 0.0
    for operator in trace.operators:
        arithmetic_s = operator.flops / speed.flops_per_s(operator.dtype)
        moving_s = moved_bytes(operator) / speed.bytes_per_s
        at_peak_s += arithmetic_s
        if arithmetic_s > moving_s:
            compute_s += arithmetic_s
        else:
            memory_s += moving_s
    return Bounds(compute_s, memory_s, at_peak_s)


def moved_bytes(operator: Operator) -> int:
    return operator.read_bytes + operator.written_bytes


def speed_of_this_cpu(num_threads: int) -> Speed:
    """Measure a matrix product in float32, and a copy. The number of torch's threads changes."""
    torch.set_num_threads(num_threads)
    matrix = torch.rand(_MATMUL_SIZE, _MATMUL_SIZE)
    product_s = _fastest_s(lambda: matrix @ matrix)
    source = torch.ones(_COPIED_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    copy_s = _fastest_s(lambda: target.copy_(source))
    flops_per_s = 2 * _MATMUL_SIZE**3 / product_s
    return Speed(lambda _: flops_per_s, 2 * _COPIED_BYTES / copy_s)


def _fastest_s(function: Callable[[], object]) -> float:
    times_s = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        function()
        times_s.append(time.perf_counter() - began)
    return min(times_s)
