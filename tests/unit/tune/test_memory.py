"""What counts as too little memory, and how much of it steps may take and take."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from framework.errors import RunError
from tests.helpers.internals import DeviceMemory, HostMemory, is_out_of_memory

MIB = 1 << 20
CUDA = torch.device("cuda", 0)


# `raise error from error` makes it its own cause.
ITSELF = RuntimeError("raised again")


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def while_handled(error: Exception, first: Exception) -> Exception:
    error.__context__ = first
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
        (while_handled(KeyError("retries"), torch.OutOfMemoryError("CUDA out of memory.")), True),
        (caused(ITSELF, ITSELF), False),
    ],
    ids=str,
)
def test_errors_that_are_about_memory(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_the_peak_counts_since_it_was_cleared() -> None:
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


def test_the_nodes_processes_share_its_memory(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 4000 kB\n")
    (tmp_path / "proc/self/status").write_text("VmHWM:\t 700 kB\nVmRSS:\t 500 kB\n")
    memory = HostMemory(sharing=4, margin=0.2, root=tmp_path)
    assert memory.room_bytes == int(4000 * 1024 * 0.8) // 4
    assert memory.peak_bytes() == 200 * 1024


def test_processes_share_a_gpus_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device with 700 bytes free, of which this process has 60 already."""
    state = {"peak": 60}
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(mem_get_info=None))
    for name, fake in {
        "get_memory_info": lambda _: (700, 1000),
        "memory_allocated": lambda _: 60,
        "max_memory_allocated": lambda _: state["peak"],
        "reset_peak_memory_stats": lambda _: state.update(peak=60),
        "empty_cache": lambda: None,
    }.items():
        monkeypatch.setattr(torch.accelerator, name, fake)
    memory = DeviceMemory([CUDA, CUDA], sharing=2, margin=0.1)
    # Two processes share 700 less a tenth.
    assert memory.room_bytes == 315
    state["peak"] = 260
    assert memory.peak_bytes() == 200
    memory.clear()
    assert memory.peak_bytes() == 0
