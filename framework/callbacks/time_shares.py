"""Where the time of profiled steps went: shares of a rank's time, and the operators that took most of it.

Every moment of the steps belongs to one part, the first of these that it fits:

    on the CPU     data, copies, compute, exchange; idle is what remains
    on a GPU       compute, exchange, copies, data; idle is what remains

So copies and exchanges count only where nothing is computed meanwhile. On a GPU the moments are the device's: `data` is
the time in which it has nothing to do while its process waits for a batch.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

PARTS = ("compute", "copies", "exchange", "data", "idle")
"""The names of the shares."""

MAX_OPERATORS = 10

# Collectives of a process group; on the CPU, from their start until every rank has taken part.
_EXCHANGE = re.compile(r"(gloo|nccl|ucc|mpi|xccl):|nccl|c10d|_c10d|c10d_functional")
_COPIES = re.compile(r"aten::(copy_|_to_copy)$|Memcpy")
# Operators have a namespace. Those of autograd and torch are ranges around operators, and what compiled code calls is
# none.
_OPERATOR = re.compile(r"(?!autograd::|torch::)\w+::|CompiledFunction|## Call CompiledFxGraph")

# Named by a digest of 52 letters.
_COMPILED_GRAPH = re.compile(r"## Call CompiledFxGraph (\w{8})\w* ##")


class Span(NamedTuple):
    """A stretch of time, in seconds."""

    begin_s: float
    end_s: float


class PhaseMark(NamedTuple):
    """A part of a step as `FitInfo.observe_phases` names it, and when it began."""

    name: str
    begin_s: float


class TopOperator(NamedTuple):
    """What an operator took in all profiled steps, without the operators that it calls."""

    name: str
    calls: int
    seconds: float


def time_shares(
    events: Iterable[FunctionEvent], marks: Sequence[PhaseMark], window: Span, *, offset_s: float, on_gpu: bool
) -> dict[str, float]:
    """Return the share of each of PARTS in the time of the steps; empty if there was none.

    Args:
        marks: in the order of time; the last part ends with the window.
        window: the profiled steps. What lies outside of steps, as validations do, is left out.
        offset_s: what is added to the times of events to get those of the marks.
    """
    spans: dict[str, list[Span]] = {name: [] for name in PARTS}
    for event in events:
        part = _part_of(event, on_gpu=on_gpu)
        if part is not None:
            begin_s = event.time_range.start * 1e-6 + offset_s
            end_s = event.time_range.end * 1e-6 + offset_s
            spans[part].append(Span(begin_s, end_s))

    spans["data"] += _spans_of("data", marks, window)
    if not on_gpu:
        spans["exchange"] += _spans_of("waiting", marks, window)
    outside = _spans_of("outside", marks, window)

    remaining = _without([window], _union(outside))
    total_s = _length(remaining)
    if total_s <= 0:
        return {}
    shares = {}
    order = ("compute", "exchange", "copies", "data") if on_gpu else ("data", "copies", "compute", "exchange")
    for part in order:
        others = _without(remaining, _union(spans[part]))
        shares[part] = (_length(remaining) - _length(others)) / total_s
        remaining = others
    shares["idle"] = _length(remaining) / total_s
    return {part: shares[part] for part in PARTS}


def steps_seconds(marks: Sequence[PhaseMark], window: Span) -> float:
    """Return the time of the window without what lies outside of steps."""
    return _length([window]) - _length(_spans_of("outside", marks, window))


def top_operators(
    events: Iterable[FunctionEvent], marks: Sequence[PhaseMark], window: Span, *, offset_s: float, on_gpu: bool
) -> list[TopOperator]:
    """Return the operators that took most time, the first one most: that of their kernels on a GPU.

    The arguments are those of `time_shares`.
    """
    outside = _union(_spans_of("outside", marks, window))
    begins_s = [span.begin_s for span in outside]
    calls: Counter[str] = Counter()
    microseconds: Counter[str] = Counter()
    for event in events:
        is_operator = _OPERATOR.match(event.name) and not _EXCHANGE.match(event.name)
        if event.is_user_annotation or not is_operator or event.device_type != DeviceType.CPU:
            continue
        began_s = event.time_range.start * 1e-6 + offset_s
        place = bisect_right(begins_s, began_s) - 1
        is_outside = place >= 0 and began_s < outside[place].end_s
        if is_outside or not window.begin_s <= began_s < window.end_s:
            continue
        calls[event.name] += 1
        microseconds[event.name] += event.self_device_time_total if on_gpu else event.self_cpu_time_total
    operators = []
    for name, number in microseconds.most_common(MAX_OPERATORS):
        if number > 0:
            shown_name = _COMPILED_GRAPH.sub(r"compiled graph \1", name)
            operators.append(TopOperator(shown_name, calls[name], number * 1e-6))
    return operators


def _spans_of(name: str, marks: Sequence[PhaseMark], window: Span) -> list[Span]:
    """Return when the part of that name was under way. The last part ends with the window."""
    ends = [mark.begin_s for mark in marks[1:]] + [window.end_s]
    spans = []
    for mark, end_s in zip(marks, ends, strict=True):
        if mark.name == name:
            spans.append(Span(mark.begin_s, end_s))
    return spans


def _part_of(event: Any, *, on_gpu: bool) -> str | None:
    """Return the part that an event belongs to; None for ranges around others and for what isn't on the device."""
    is_on_gpu = event.device_type != DeviceType.CPU
    if event.is_user_annotation and not _EXCHANGE.match(event.name):
        return None
    if is_on_gpu != on_gpu:
        return None
    if _EXCHANGE.match(event.name):
        return "exchange"
    if _COPIES.match(event.name):
        return "copies"
    if on_gpu or _OPERATOR.match(event.name):
        return "compute"
    return None


# Stretches of time


def _union(spans: Iterable[Span]) -> list[Span]:
    """Return the same time in ascending spans that don't overlap."""
    merged: list[Span] = []
    for span in sorted(spans):
        if merged and span.begin_s <= merged[-1].end_s:
            merged[-1] = Span(merged[-1].begin_s, max(merged[-1].end_s, span.end_s))
        else:
            merged.append(span)
    return merged


def _without(spans: Sequence[Span], removed: Sequence[Span]) -> list[Span]:
    """Return the time of `spans` that isn't in `removed`. Both are ascending and don't overlap."""
    kept = []
    index = 0
    for span in spans:
        begin_s = span.begin_s
        while index < len(removed) and removed[index].end_s <= begin_s:
            index += 1
        place = index
        while place < len(removed) and removed[place].begin_s < span.end_s:
            if removed[place].begin_s > begin_s:
                kept.append(Span(begin_s, removed[place].begin_s))
            begin_s = max(begin_s, removed[place].end_s)
            place += 1
        if begin_s < span.end_s:
            kept.append(Span(begin_s, span.end_s))
    return kept


def _length(spans: Iterable[Span]) -> float:
    return sum(span.end_s - span.begin_s for span in spans)
