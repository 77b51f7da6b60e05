from __future__ import annotations

from collections import Counter, OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from framework.checkpoint import snapshot as snapshot_module
from framework.checkpoint.files import BLOCK_BYTES
from framework.checkpoint.snapshot import KeptBuffers, Snapshot, bytes_of, fingerprints, take


def copied(state: Any, *, late: Any = (), buffers: KeptBuffers | None = None) -> Any:
    snapshot = take(state, late=late, buffers=buffers or KeptBuffers())
    return finished(snapshot).state


def finished(snapshot: Snapshot) -> Snapshot:
    with ThreadPoolExecutor(1) as thread:
        snapshot.begin(thread)
        assert snapshot.finish() is None
    snapshot.wait_for_devices()
    return snapshot


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return type(one) is type(other) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return type(one) is type(other) and list(one) == list(other) and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and bool(one == other)


STATE: dict[Any, Any] = {
    "plain": [1, 2.5, "three", None, (True, b"4"), {5, 6}, bytearray(b"7"), Counter("aab")],
    "ordered": OrderedDict(a=torch.arange(5), b=torch.tensor(2.5, dtype=torch.float64)),
    "kinds": [
        torch.zeros(0),
        torch.ones(3, dtype=torch.bfloat16),
        torch.arange(12).reshape(3, 4).t(),
        torch.tensor([1 + 2j]),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([True, False]),
        torch.eye(3).to_sparse(),
        nn.Parameter(torch.ones(2)),
        torch.rand(300, 300),
    ],
    1: {"nested": ({"deep": torch.ones(2, 2)},)},
}


@pytest.mark.parametrize("is_late", [False, True])
def test_a_copy_is_equal_and_shares_nothing(is_late: bool) -> None:
    tensors = [STATE["kinds"][-1], STATE["ordered"]["a"]] if is_late else []
    copy = copied(STATE, late=tensors)
    kinds, kinds_of_copy = STATE["kinds"], copy["kinds"]
    sparse = 6
    assert equal(kinds_of_copy[sparse].to_dense(), kinds[sparse].to_dense())
    assert equal(
        {**copy, "kinds": [*kinds_of_copy[:sparse], *kinds_of_copy[sparse + 1 :]]},
        {**STATE, "kinds": [*kinds[:sparse], *kinds[sparse + 1 :]]},
    )
    for one, other in zip(kinds, kinds_of_copy, strict=True):
        assert one.layout is not torch.strided or not one.numel() or one.data_ptr() != other.data_ptr()
    copy["plain"][5].add(8)
    assert STATE["plain"][5] == {5, 6}


def test_what_shares_memory_does_so_in_the_copy() -> None:
    whole = torch.arange(10.0)
    copy = copied({"whole": whole, "part": whole[4:6], "again": whole})
    copy["whole"][4] = -1
    assert copy["part"].tolist() == [-1, 5]
    assert copy["again"].data_ptr() == copy["whole"].data_ptr()
    assert whole[4] == 4
    assert bytes_of({"whole": whole, "part": whole[4:6], "more": [torch.zeros(2)]}) == 2 * BLOCK_BYTES


def test_a_modules_versions_stay_with_its_state() -> None:
    state: Any = nn.BatchNorm1d(2).state_dict()
    assert copied(state)._metadata == state._metadata


def test_late_ones_are_copied_later_and_the_others_at_once() -> None:
    late, other = torch.zeros(4), torch.zeros(4)
    snapshot = take({"late": late, "other": other}, late=[late], buffers=KeptBuffers())
    other.fill_(1)
    with torch.no_grad():
        late.data[0] = 0  # through .data no version moves, as nothing moves here
    copy = finished(snapshot).state
    assert (copy["late"].tolist(), copy["other"].tolist()) == ([0] * 4, [0] * 4)


def test_a_late_one_that_has_changed_is_named() -> None:
    weight = nn.Parameter(torch.zeros(4))
    snapshot = take({"model": {"weight": weight.detach()}}, late=[weight], buffers=KeptBuffers())
    with ThreadPoolExecutor(1) as thread:
        snapshot.begin(thread)
        with torch.no_grad():
            weight.add_(1)
        assert snapshot.finish() == "model.weight"


def test_buffers_are_kept_from_copy_to_copy_and_dropped_when_not_needed() -> None:
    buffers = KeptBuffers()
    state = {"a": torch.rand(1000), "b": torch.rand(1000), "c": torch.rand(100_000)}
    first = {name: tensor.data_ptr() for name, tensor in copied(state, buffers=buffers).items()}
    second = {name: tensor.data_ptr() for name, tensor in copied(state, buffers=buffers).items()}
    assert sorted(first.values()) == sorted(second.values())
    assert first["c"] % 4096 == 0
    copied({"a": state["a"]}, buffers=buffers)
    assert sum(len(each) for each in buffers._used.values()) == 1
    copied({"a": state["a"]}, buffers=buffers)
    assert sum(len(each) for each in buffers._free.values()) == 0


class Queue:
    """A stand-in for a device's stream: what is to be done is noted, and done when somebody waits for it."""

    def __init__(self, notes: list[str], name: str) -> None:
        self.notes, self.name = notes, name

    def __enter__(self) -> None:
        self.notes.append(f"enter {self.name}")

    def __exit__(self, *_: object) -> None:
        self.notes.append(f"leave {self.name}")

    def wait_stream(self, other: Queue) -> None:
        self.notes.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Queue) -> None:
        self.notes.append(f"{self.name} waits for the event of {event.name}")

    def record_event(self) -> Queue:
        self.notes.append(f"event of {self.name}")
        return self

    def synchronize(self) -> None:
        self.notes.append(f"the host waits for {self.name}")


def test_a_device_copies_beside_what_it_computes_and_the_host_waits_in_the_writers_thread_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The calls, with the CPU in the place of a GPU."""
    notes: list[str] = []
    monkeypatch.setattr(snapshot_module, "_STREAMED", {"cpu"})
    monkeypatch.setattr(snapshot_module, "_new_buffer", lambda size, **_: torch.zeros(size, dtype=torch.uint8))
    monkeypatch.setattr(torch, "Stream", lambda **_: Queue(notes, "the copier"))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: Queue(notes, "training"))
    weight, buffer = torch.ones(3), torch.ones(2)
    snapshot = take({"weight": weight, "buffer": buffer}, late=[weight], buffers=KeptBuffers())
    assert snapshot.state["buffer"].tolist() == [1, 1]
    assert snapshot.state["weight"].tolist() == [0, 0, 0]
    with ThreadPoolExecutor(1) as thread:
        snapshot.begin(thread)
        assert snapshot.state["weight"].tolist() == [1, 1, 1]
        assert snapshot.finish() is None
    assert "the host waits for the copier" not in notes
    snapshot.wait_for_devices()
    assert notes == [
        "the copier waits for training",
        "enter the copier",
        "leave the copier",
        "event of the copier",
        "training waits for the event of the copier",
        "the host waits for the copier",
    ]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.bool, torch.int8]
)
def test_a_fingerprint_changes_with_any_value(dtype: torch.dtype) -> None:
    values = torch.zeros(7, dtype=dtype)
    views = [
        values,
        torch.zeros(9, dtype=dtype)[1:8],
        torch.zeros(7, 2, dtype=dtype)[:, 0],
        torch.zeros((), dtype=dtype),
    ]
    for view in views:
        assert fingerprints([view]) == [0]
        for index in range(view.numel()):
            changed = view.clone()
            changed.reshape(-1)[index] = 1
            assert fingerprints([view, changed])[1] != 0
