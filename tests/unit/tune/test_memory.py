"""What counts as too little memory, and how much of it steps take."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from framework.errors import RunError
from framework.tune.memory import DeviceMemory, HostMemory, is_out_of_memory, memory_of
from tests.unit.simulated_ranks import CPU

MIB = 1 << 20


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (MemoryError(), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:119] DefaultCPUAllocator: can't allocate memory: you tried"),
            True,
        ),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (caused(RunError("Samples [0] of the train dataset don't make a batch"), MemoryError()), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x3 and 5x1)"), False),
        (caused(RunError("Sample 3 raised"), ValueError("out of memory")), False),
        (ValueError("out of memory"), False),
        (None, False),
    ],
    ids=str,
)
def test_what_is_about_memory(error: Exception | None, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_the_peak_is_of_this_process_since_it_was_asked() -> None:
    with memory_of([CPU], procs=1, sharing=1, margin=0.0) as mine:
        mine.clear()
        first = mine.peak_bytes()
        taken = torch.ones(64 * MIB, dtype=torch.uint8)
        del taken
        after = mine.peak_bytes()
        if first is None or after is None:
            pytest.skip("this system doesn't tell how much memory a process has")
        assert 60 * MIB < after - first < 80 * MIB
        assert mine.room_bytes is not None
        assert not mine.is_held
        mine.clear()
        again = mine.peak_bytes()
        assert again is not None
        assert again < after - 32 * MIB  # given back, and counted anew


def test_the_room_is_a_part_of_what_is_left(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 4000 kB\n")
    (tmp_path / "proc/self/status").write_text("VmHWM:\t 700 kB\nVmRSS:\t 500 kB\n")
    found = HostMemory(sharing=4, margin=0.2, root=tmp_path)
    assert found.room_bytes == int(4000 * 1024 * 0.8) // 4
    found.clear()
    assert (tmp_path / "proc/self/clear_refs").read_text() == "5"
    assert found.peak_bytes() == 200 * 1024


def test_where_nothing_is_told_nothing_is_known(tmp_path: Path) -> None:
    found = HostMemory(sharing=1, margin=0.1, root=tmp_path)
    found.clear()
    assert (found.room_bytes, found.peak_bytes()) == (None, None)


class FakeDevice:
    """What torch.cuda tells and is told, of a device of 1000 bytes of which others have 200."""

    def __init__(self) -> None:
        self.fraction = 0.95
        self.asked: list[float] = []
        self.allocated, self.peak, self.reserved = 60, 60, 100

    def module(self, device: Any) -> Any:
        def set_fraction(share: float, device: Any) -> None:
            self.asked.append(share)
            self.fraction = share

        return SimpleNamespace(
            mem_get_info=lambda _: (700, 1000),
            memory_reserved=lambda _: self.reserved,
            memory_allocated=lambda _: self.allocated,
            max_memory_allocated=lambda _: self.peak,
            reset_peak_memory_stats=lambda _: setattr(self, "peak", self.allocated),
            set_per_process_memory_fraction=set_fraction,
            get_per_process_memory_fraction=lambda _: self.fraction,
        )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    device = FakeDevice()
    monkeypatch.setattr(torch, "get_device_module", device.module)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    return device


def test_an_allocator_is_held_to_its_part_and_set_back(fake: FakeDevice) -> None:
    cuda = torch.device("cuda", 0)
    with memory_of([cuda, cuda], procs=8, sharing=2, margin=0.1) as mine:
        assert mine.is_held
        assert mine.room_bytes == 315  # of 700 without a tenth, for two
        assert fake.fraction == pytest.approx(0.415)  # and what it has already
        mine.clear()
        fake.peak = 260
        assert mine.peak_bytes() == 200
    assert fake.fraction == 0.95
    assert len(fake.asked) == 2


def test_an_allocator_is_set_back_after_an_error(fake: FakeDevice) -> None:
    with pytest.raises(ValueError, match="mine"), memory_of([torch.device("cuda", 0)], procs=1, sharing=1, margin=0.1):
        raise ValueError("mine")
    assert fake.fraction == 0.95


def test_a_device_that_tells_nothing_is_only_tried(monkeypatch: pytest.MonkeyPatch, fake: FakeDevice) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace())
    found = DeviceMemory([torch.device("mps")], sharing=1, margin=0.1)
    found.hold()
    found.clear()
    found.release()
    assert (found.room_bytes, found.peak_bytes(), found.is_held) == (None, None, True)
