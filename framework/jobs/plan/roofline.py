"""How long a step takes at least: each operator at the speed of the device's arithmetic or of its memory.

S. Williams, A. Waterman and D. Patterson, Roofline: an insightful visual performance model, CACM 52 (2009).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from framework.jobs.plan.trace import BACKWARD, Operator, Trace

_MATMUL_SIZE = 768
_COPIED_BYTES = 64 << 20
_ROUNDS = 5


class Speed(NamedTuple):
    """What a device does in a second."""

    # Of matrix products and convolutions such as this one.
    flops_per_s: Callable[[Operator], float]
    # Read and written.
    bytes_per_s: float


class Bounds(NamedTuple):
    """What a step computes, and its least seconds by what bounds its operators."""

    # Without what is recomputed.
    flops: float
    compute_s: float
    memory_s: float
    # Of these, in the backward.
    backward_s: float
    # Of `flops` at the device's peak.
    at_peak_s: float
    # Operators that compute something, and aren't views.
    operators: float


def bounds_of(trace: Trace, speed: Speed) -> Bounds:
    """Return the time of a traced step."""
    flops = 0.0
    compute_s = 0.0
    memory_s = 0.0
    backward_s = 0.0
    at_peak_s = 0.0
    operators = 0.0
    for operator in trace.operators:
        times = trace.times(operator)
        moved_bytes = operator.read_bytes + operator.written_bytes
        moving_s = times * moved_bytes / speed.bytes_per_s
        arithmetic_s = 0.0
        if operator.flops:
            arithmetic_s = times * operator.flops / speed.flops_per_s(operator)
        if not operator.recomputed:
            flops += times * operator.flops
            at_peak_s += arithmetic_s
        if arithmetic_s > moving_s:
            compute_s += arithmetic_s
        else:
            memory_s += moving_s
        if operator.phase == BACKWARD:
            backward_s += max(arithmetic_s, moving_s)
        if moved_bytes:
            operators += times
    return Bounds(flops, compute_s, memory_s, backward_s, at_peak_s, operators)


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
