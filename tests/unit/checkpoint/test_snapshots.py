"""Copies of a state in page-locked memory, with stand-ins for a GPU and its driver."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.helpers.exact import tree_differences
from tests.helpers.internals import Snapshots

MIB = 2**20


class Driver:
    """Notes which memory is page-locked."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.status = 0

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:  # noqa: N802
        self.sizes[address] = size_bytes
        return self.status

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.sizes[address]
        return 0


class Stream:
    def record_event(self) -> Stream:
        return self

    def synchronize(self) -> None:
        pass


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Snapshots that take the memory of this process for a GPU's."""
    driver = Driver()
    monkeypatch.setattr("torch.cuda.cudart", lambda: driver)
    monkeypatch.setattr("torch.accelerator.current_stream", lambda _: Stream())
    plain = Snapshots._copy_storage

    def copy_storage(self: Snapshots, storage: torch.UntypedStorage, device: torch.device) -> Any:
        return plain(self, storage, Gpu())  # type: ignore[arg-type]

    monkeypatch.setattr(Snapshots, "_copy_storage", copy_storage)
    allocate = torch.empty

    def empty(*size: int, pin_memory: bool = False, device: Any = None, **options: Any) -> torch.Tensor:
        if pin_memory:
            driver.sizes[-len(driver.sizes) - 1] = size[0]
        return allocate(*size, device=None if isinstance(device, Gpu) else device, **options)

    monkeypatch.setattr("torch.empty", empty)
    return driver


class Gpu:
    type = "cuda"


def state() -> Mapping[str, Any]:
    large = torch.arange(5 * MIB // 4 + 1, dtype=torch.float32)
    return {"weights": large, "row": large[:3], "bias": torch.ones(3), "step": 5}


def test_large_buffers_are_not_rounded_up(driver: Driver) -> None:
    snapshots = Snapshots()
    copied = snapshots.take(state())
    snapshots.wait()
    assert tree_differences(copied, state()) == []
    assert sorted(driver.sizes.values()) == [12, 5 * MIB + 4]
    again = snapshots.take(state())
    assert again["weights"].data_ptr() == copied["weights"].data_ptr()
    assert len(driver.sizes) == 2


def test_the_driver_unpins_memory_before_freeing(driver: Driver) -> None:
    snapshots = Snapshots()
    snapshots.take({"weights": torch.zeros(MIB)})
    assert list(driver.sizes.values()) == [4 * MIB]
    del snapshots
    gc.collect()
    assert driver.sizes == {}


def test_memory_that_cannot_be_locked_is_an_error(driver: Driver) -> None:
    driver.status = 2
    with pytest.raises(RuntimeError):
        Snapshots().take({"weights": torch.zeros(MIB)})
