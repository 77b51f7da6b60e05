"""What counts as too little memory, and how much of it steps may take and take."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from framework.errors import RunError
from framework.jobs.tune.batch_size import DeviceMemory, HostMemory, is_out_of_memory, reserved_bytes

MIB = 1 << 20
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:119] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (caused(RunError("Samples [0] of the train dataset don't make a batch"), MemoryError()), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x3 and 5x1)"), False),
        (caused(RunError("Sample 3 raised"), ValueError("out of memory")), False),
    ],
    ids=str,
)
def test_errors_that_are_about_memory(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_the_peak_is_this_processs_since_it_was_cleared() -> None:
    memory = HostMemory(sharing=1, margin=0.0)
    memory.clear()
    first = memory.peak_bytes()
    taken = torch.ones(64 * MIB, dtype=torch.uint8)
    del taken
    after = memory.peak_bytes()
    if first is None or after is None:
        pytest.skip("this system doesn't report how much memory a process has")
    assert 60 * MIB < after - first < 80 * MIB
    memory.clear()
    again = memory.peak_bytes()
    assert again is not None
    assert again < after - 32 * MIB


def test_the_hosts_room_is_shared_by_the_processes_of_a_node(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 4000 kB\n")
    (tmp_path / "proc/self/status").write_text("VmHWM:\t 700 kB\nVmRSS:\t 500 kB\n")
    memory = HostMemory(sharing=4, margin=0.2, root=tmp_path)
    assert memory.room_bytes == int(4000 * 1024 * 0.8) // 4
    assert memory.peak_bytes() == 200 * 1024


def test_a_gpus_allocator_is_held_to_its_part_and_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a device of 1000 bytes, of which 700 are free and this process has 100."""
    state = {"fraction": 1.0, "peak": 60}
    module = SimpleNamespace(
        mem_get_info=lambda _: (700, 1000),
        memory_reserved=lambda _: 100,
        memory_allocated=lambda _: 60,
        max_memory_allocated=lambda _: state["peak"],
        reset_peak_memory_stats=lambda _: state.update(peak=60),
        set_per_process_memory_fraction=lambda share, _: state.update(fraction=share),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    memory = DeviceMemory([CUDA, CUDA], sharing=2, margin=0.1)
    assert memory.room_bytes == 315  # of 700 without a tenth, for two
    assert state["fraction"] == pytest.approx(0.415)  # and what it has already
    state["peak"] = 260
    assert memory.peak_bytes() == 200
    memory.remove_limit()
    assert state["fraction"] == 1.0


def test_a_trial_leaves_room_for_the_strategys_gradients_and_for_averages() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    model[0].bias.requires_grad_(False)
    gradients, rest = 4 * (15 + 10), 4 * 5 + 4 * 10 + 8  # the rest: a bias that isn't trained, and buffers
    assert reserved_bytes(model, gradients=2, models=0) == {CPU: 2 * gradients}
    assert reserved_bytes(model, gradients=1, models=1) == {CPU: 2 * gradients + rest}
