"""Where the time of profiled steps went, from events that a profiler may have recorded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import DeviceType

from tests.helpers.internals import PARTS, PhaseMark, Span, time_shares

SECOND = Span(100.0, 101.0)


def event(name: str, begin_ms: float, end_ms: float, *, on_gpu: bool = False, is_range: bool = False) -> Any:
    """An event whose clock began when the window did."""
    return SimpleNamespace(
        name=name,
        time_range=SimpleNamespace(start=begin_ms * 1e3, end=end_ms * 1e3),
        device_type=DeviceType.CUDA if on_gpu else DeviceType.CPU,
        is_user_annotation=is_range,
    )


def kernel(name: str, begin_ms: float, end_ms: float) -> Any:
    return event(name, begin_ms, end_ms, on_gpu=True)


def percents(events: list[Any], *marks: tuple[str, float], on_gpu: bool = False) -> dict[str, int]:
    """The shares that aren't 0, in percent. marks: what began when, in ms."""
    phase_marks = [PhaseMark("logging", SECOND.begin_s)]
    phase_marks += [PhaseMark(name, SECOND.begin_s + begin_ms / 1e3) for name, begin_ms in marks]
    shares = time_shares(events, phase_marks, SECOND, offset_s=SECOND.begin_s, on_gpu=on_gpu)
    return {part: round(share * 100) for part, share in shares.items() if round(share * 100)}


def test_an_operator_within_another_counts_once() -> None:
    events = [
        event("ProfilerStep#12", 0, 1000, is_range=True),
        event("autograd::engine::evaluate_function: MmBackward0", 0, 900),
        event("aten::linear", 0, 500),
        event("aten::addmm", 100, 300),
        event("aten::copy_", 400, 500),
        event("my_ops::fused", 600, 700),
    ]
    assert percents(events) == {"compute": 50, "copies": 10, "idle": 40}


def test_only_exchange_without_computing_is_exchange() -> None:
    events = [event("gloo:all_reduce", 0, 600, is_range=True), event("aten::mm", 0, 400)]
    assert percents(events) == {"compute": 40, "exchange": 20, "idle": 40}
    assert percents(events, ("waiting", 500), ("optimizer", 900)) == {"compute": 40, "exchange": 50, "idle": 10}


def test_loading_on_the_cpu_is_data_whatever_runs() -> None:
    events = [event("aten::index", 0, 300), event("aten::mm", 300, 400)]
    assert percents(events, ("data", 0), ("forward", 300)) == {"data": 30, "compute": 10, "idle": 60}


def test_the_time_outside_of_steps_is_left_out() -> None:
    events = [event("aten::mm", 0, 250), event("aten::mm", 500, 1000)]
    assert percents(events, ("outside", 500)) == {"compute": 50, "idle": 50}


def test_a_gpu_counts_what_it_does_itself() -> None:
    events = [
        event("aten::mm", 0, 1000),
        kernel("sgemm", 0, 300),
        kernel("ncclDevKernel_AllReduce_Sum_f32", 200, 500),
        kernel("Memcpy HtoD (Pinned -> Device)", 400, 600),
        event("## forward", 0, 1000, on_gpu=True, is_range=True),
    ]
    shares = percents(events, ("data", 550), ("forward", 800), on_gpu=True)
    assert shares == {"compute": 30, "exchange": 20, "copies": 10, "data": 20, "idle": 20}


NAMES = st.sampled_from(["aten::mm", "aten::copy_", "gloo:all_reduce", "MmBackward0"])
MOMENTS = st.floats(-100, 1100)
EVENTS = st.builds(
    lambda name, moments, on_gpu: event(name, min(moments), max(moments), on_gpu=on_gpu),
    NAMES,
    st.tuples(MOMENTS, MOMENTS),
    st.booleans(),
)
PHASES = st.tuples(st.sampled_from(["data", "forward", "waiting", "outside"]), st.floats(1, 999))


@given(st.lists(EVENTS), st.lists(PHASES), st.booleans())
def test_the_shares_are_the_whole(events: list[Any], phases: list[tuple[str, float]], on_gpu: bool) -> None:
    marks = [PhaseMark("forward", SECOND.begin_s)]
    for name, begin_ms in sorted(phases, key=lambda phase: phase[1]):
        marks.append(PhaseMark(name, SECOND.begin_s + begin_ms / 1e3))
    shares = time_shares(events, marks, SECOND, offset_s=SECOND.begin_s, on_gpu=on_gpu)
    assert tuple(shares) == PARTS
    assert all(share >= -1e-9 for share in shares.values())
    assert sum(shares.values()) == pytest.approx(1.0)
