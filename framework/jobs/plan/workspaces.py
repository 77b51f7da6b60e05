"""What operators take while they run on this CPU, beyond their results: found by running them once.

oneDNN's convolutions copy their tensors to other layouts, for example, and matrix products in bfloat16 do, too. Which
copies they make depends on the machine, so nothing but running them tells. Only those are run whose workspace may raise
the peak.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from framework.jobs.plan.calls import Call
from framework.jobs.plan.trace import Operator, Trace

# Products of these types need no copies.
_WHOLE_TYPES = (torch.float32, torch.float64)
_PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.")
# What only fills, copies or updates in place.
_WITHOUT = (
    "aten._foreach_",
    "aten._fused_",
    "aten._to_copy.",
    "aten.cat.",
    "aten.clone.",
    "aten.copy_.",
    "aten.empty",
    "aten.fill",
    "aten.new_",
    "aten.ones",
    "aten.zero",
)
# Arguments that only the library that wrote them understands: with other bytes it crashes, as oneDNN's LSTM does.
_OPAQUE = frozenset(("workspace", "reserve"))
# A workspace is assumed to be at most this many times what the operator reads and writes.
_MOST = 3
# Larger operators aren't run: that would take the memory and the time of a training.
_LARGEST_BYTES = 1 << 30


def with_workspaces(trace: Trace) -> Trace:
    """Return the trace with the workspaces of those operators that may decide the peak."""
    live = trace.live_bytes()
    workspaces: dict[Call, int] = {}
    operators = list(trace.operators)
    peak = max(live)
    order = sorted(range(len(live)), key=lambda index: -live[index] - _most_bytes(operators[index]))
    for index in order:
        operator = operators[index]
        if live[index] + _most_bytes(operator) <= peak:
            # Those behind it may take even less.
            break
        call = operator.call
        if call is None:
            continue
        if call not in workspaces:
            workspaces[call] = _workspace_bytes(call)
        operators[index] = replace(operator, workspace_bytes=workspaces[call])
        peak = max(peak, live[index] + workspaces[call])
    return replace(trace, operators=tuple(operators))


def _most_bytes(operator: Operator) -> int:
    """Return a bound of the operator's workspace."""
    call = operator.call
    if call is None or call.operator.is_view or call.operator.namespace != "aten":
        return 0
    if operator.name.startswith(_WITHOUT) or operator.read_bytes + operator.written_bytes > _LARGEST_BYTES:
        return 0
    if any(argument.name in _OPAQUE for argument in call.operator._schema.arguments):
        return 0
    if operator.name.startswith(_PRODUCTS) and operator.dtype in _WHOLE_TYPES:
        return 0
    if torch.Tag.pointwise in call.operator.tags and not call.mixes_types:
        return 0
    return _MOST * (operator.read_bytes + operator.written_bytes)


def _workspace_bytes(call: Call) -> int:
    """Make the call; return the most that it takes, beyond what it leaves; 0 if it refuses the values that it gets."""
    arguments, keywords = call.arguments()
    # Otherwise it prints that it found no GPU, and when it starts and stops.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    try:
        with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            result = call.operator(*arguments, **keywords)
    except Exception:
        # Such as sequences of length 0, or a matrix that has no inverse.
        return 0
    most = 0
    total = 0
    for _, change in sorted(memory_events(profiler)):
        total += change
        most = max(most, total)
    del result
    return most - total


def memory_events(profiler: profile) -> Iterator[tuple[int, int]]:
    """Yield when the CPU's allocator gave or took back memory, in ns, and how many bytes: negative for freed ones."""
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = list(profiler.profiler.kineto_results.experimental_event_tree())
    while events:
        event = events.pop()
        events += event.children
        if event.tag == _EventType.Allocation:
            allocation: Any = event.extra_fields
            yield event.start_time_ns, allocation.alloc_size
