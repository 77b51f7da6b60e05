"""Forecast how long an optimizer step takes on this CPU, from its trace.

Each distinct operator of the step is made here with tensors of the same shapes. What a step takes beside its operators
(autograd, modules, the optimizer's Python) is measured with a small model, for each operator.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import torch
from torch import nn

from framework.jobs.plan.calls import Call, measured
from framework.jobs.plan.trace import BACKWARD, FORWARD, UPDATE, Operator, Trace, Tracer
from framework.system.allocator import tune_malloc

_SMALL_STEPS = 200
_MATMUL_SIZE = 768
_COPIED_BYTES = 64 << 20
_ROUNDS = 5


class StepTime(NamedTuple):
    """The seconds of a step by what bounds them; together they are the step's."""

    # Operators that are bound by arithmetic, or by memory.
    compute: float
    memory: float
    # Autograd, Python, and starting operators.
    overhead: float
    # Of all FLOPs, if they were computed at the device's peak.
    at_peak: float


def cpu_step_time(trace: Trace, *, num_threads: int, notes: list[str]) -> StepTime:
    """Return the time on this CPU, measured in seconds. The number of torch's threads and malloc's settings change."""
    tune_malloc()
    torch.set_num_threads(num_threads)
    peak = _matmul_flops_per_s()
    bandwidth = _copied_bytes_per_s()
    overhead_s = _overhead_per_operator_s() * len(trace.operators)
    seconds = _measured(trace.operators)

    compute_s = 0.0
    memory_s = 0.0
    missing = 0
    for operator in trace.operators:
        arithmetic_s = operator.flops / peak
        moving_s = _moved_bytes(operator) / bandwidth
        operator_s = None
        if operator.call is not None:
            operator_s = seconds.get(operator.call)
        if operator_s is None:
            missing += 1
            operator_s = max(arithmetic_s, moving_s)
        if arithmetic_s > moving_s:
            compute_s += operator_s
        else:
            memory_s += operator_s
    if missing:
        notes.append(f"{missing} operators can't be called with other values; their times are those of their bytes")
    return StepTime(compute_s, memory_s, overhead_s, trace.flops / peak)


def seconds_for_batches(load: Callable[[], object], *, number: int) -> float:
    """Return how long one call of `load` takes, the median of several."""
    return median(_timed(load) for _ in range(number))


def _moved_bytes(operator: Operator) -> int:
    return operator.read_bytes + operator.written_bytes


# The speed of this CPU


def _measured(operators: Sequence[Operator]) -> dict[Call, float]:
    return measured(operator.call for operator in operators if operator.call is not None)


def _timed(function: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    function()
    return time.perf_counter() - begin_s


def _matmul_flops_per_s() -> float:
    matrix = torch.rand(_MATMUL_SIZE, _MATMUL_SIZE)
    fastest_s = min(_timed(lambda: matrix @ matrix) for _ in range(_ROUNDS))
    return 2 * _MATMUL_SIZE**3 / fastest_s


def _copied_bytes_per_s() -> float:
    """Return the bytes that a copy reads and writes in a second."""
    source = torch.ones(_COPIED_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    fastest_s = min(_timed(lambda: target.copy_(source)) for _ in range(_ROUNDS))
    return 2 * _COPIED_BYTES / fastest_s


def _overhead_per_operator_s() -> float:
    """Return what a step of a small model takes beside its operators, for each of them."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    inputs = torch.ones(8, 8)
    phase = FORWARD

    def step() -> None:
        nonlocal phase
        phase = FORWARD
        loss = model(inputs).square().mean()
        phase = BACKWARD
        loss.backward()
        phase = UPDATE
        optimizer.step()
        optimizer.zero_grad()

    with Tracer(lambda: phase) as tracer:
        step()
        tracer.start_step()
        step()
    operators = tracer.trace().operators
    step_s = median(_timed(step) for _ in range(_SMALL_STEPS))
    seconds = _measured(operators)
    operators_s = sum(seconds[operator.call] for operator in operators if operator.call is not None)
    return max(0.0, step_s - operators_s) / len(operators)
