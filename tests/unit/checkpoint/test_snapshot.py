"""A copy of a state to be written beside training: equal to it, and not changed by what training does next."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from framework.checkpoint import snapshot as snapshot_module
from framework.checkpoint.files import BLOCK_BYTES
from framework.checkpoint.snapshot import KeptBuffers, bytes_of, fingerprints, take
from tests.helpers.exact import tree_differences


def copied(state: Any, *, late: Sequence[Any] = (), buffers: KeptBuffers | None = None) -> Any:
    snapshot = take(state, late=late, buffers=buffers or KeptBuffers())
    with ThreadPoolExecutor(1) as thread:
        snapshot.begin(thread)
        assert snapshot.finish() is None
    snapshot.wait_for_devices()
    return snapshot.state


TENSORS = [
    torch.zeros(0),
    torch.ones(3, dtype=torch.bfloat16),
    torch.arange(12).reshape(3, 4).t(),
    torch.tensor([1 + 2j]),
    torch.tensor([1 + 2j]).conj(),
    torch.tensor([True, False]),
    nn.Parameter(torch.ones(2)),
    torch.rand(300, 300),
]
STATE: dict[Any, Any] = {
    "plain": [1, 2.5, "three", None, (True, b"4"), {5, 6}, bytearray(b"7"), Counter("aab")],
    "ordered": OrderedDict(a=torch.arange(5), b=torch.tensor(2.5, dtype=torch.float64)),
    "kinds": TENSORS,
    1: {"nested": ({"deep": torch.ones(2, 2)},)},
}


@pytest.mark.parametrize("late", [[], [TENSORS[-1], STATE["ordered"]["a"]]], ids=["at once", "late"])
def test_a_copy_is_equal_and_shares_nothing(late: list[Any]) -> None:
    copy = copied(STATE, late=late)
    assert tree_differences(copy, STATE) == []
    assert type(copy["ordered"]) is OrderedDict
    for one, other in zip(TENSORS, copy["kinds"], strict=True):
        assert type(one) is type(other)
        assert not one.numel() or one.data_ptr() != other.data_ptr()
    copy["plain"][5].add(8)
    assert STATE["plain"][5] == {5, 6}
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(copied([sparse])[0].to_dense(), torch.eye(3))
    state: Any = nn.BatchNorm1d(2).state_dict()
    assert copied(state)._metadata == state._metadata


def test_what_shares_memory_does_so_in_the_copy() -> None:
    whole = torch.arange(10.0)
    copy = copied({"whole": whole, "part": whole[4:6], "again": whole})
    copy["whole"][4] = -1
    assert copy["part"].tolist() == [-1, 5]
    assert copy["again"].data_ptr() == copy["whole"].data_ptr()
    assert whole[4] == 4
    assert bytes_of({"whole": whole, "part": whole[4:6], "more": [torch.zeros(2)]}) == 2 * BLOCK_BYTES


def test_a_late_tensor_that_changed_too_early_is_named() -> None:
    weight = nn.Parameter(torch.zeros(4))
    snapshot = take({"model": {"weight": weight.detach()}}, late=[weight], buffers=KeptBuffers())
    with ThreadPoolExecutor(1) as thread:
        snapshot.begin(thread)
        with torch.no_grad():
            weight.add_(1)
        assert snapshot.finish() == "model.weight"


def test_memory_is_reused_from_copy_to_copy() -> None:
    buffers = KeptBuffers()
    state = {"a": torch.rand(1000), "b": torch.rand(1000), "c": torch.rand(100_000)}
    first = {name: tensor.data_ptr() for name, tensor in copied(state, buffers=buffers).items()}
    second = {name: tensor.data_ptr() for name, tensor in copied(state, buffers=buffers).items()}
    assert sorted(first.values()) == sorted(second.values())
    assert first["c"] % BLOCK_BYTES == 0, "as direct writes want it"


class Queue:
    """A stand-in for a device's stream, which notes what it is asked for."""

    def __init__(self, notes: list[str], name: str) -> None:
        self.notes, self.name = notes, name

    def __enter__(self) -> None:
        self.notes.append("copy")

    def __exit__(self, *_: object) -> None:
        pass

    def wait_stream(self, other: Queue) -> None:
        self.notes.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Queue) -> None:
        self.notes.append(f"{self.name} waits for {event.name}")

    def record_event(self) -> Queue:
        return self

    def synchronize(self) -> None:
        self.notes.append(f"the host waits for {self.name}")


def test_a_device_copies_beside_what_it_computes_and_only_the_writers_thread_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The calls, with the CPU in the place of a GPU."""
    notes: list[str] = []
    monkeypatch.setattr(snapshot_module, "_STREAMED", {"cpu"})
    monkeypatch.setattr(snapshot_module, "_new_buffer", lambda size, **_: torch.zeros(size, dtype=torch.uint8))
    monkeypatch.setattr(torch, "Stream", lambda **_: Queue(notes, "copier"))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: Queue(notes, "training"))
    weight = torch.ones(3)
    snapshot = take({"weight": weight}, late=[weight], buffers=KeptBuffers())
    with ThreadPoolExecutor(1) as thread:
        snapshot.begin(thread)
        assert snapshot.finish() is None
    assert notes == ["copier waits for training", "copy", "training waits for copier"]
    snapshot.wait_for_devices()
    assert notes[3:] == ["the host waits for copier"]
    assert snapshot.state["weight"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.bool, torch.int8]
)
def test_a_fingerprint_changes_with_any_value(dtype: torch.dtype) -> None:
    values, wide = torch.zeros(7, dtype=dtype), torch.zeros(9, 2, dtype=dtype)
    for view in (values, wide.reshape(-1)[1:8], wide[:, 0], torch.zeros((), dtype=dtype)):
        assert fingerprints([view]) == [0]
        for index in range(view.numel()):
            changed = view.clone()
            changed.reshape(-1)[index] = 1
            assert fingerprints([view, changed])[1] != 0
