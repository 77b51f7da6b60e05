"""A copy of a state to be written beside training: equal to it, and not changed by what training does next."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from framework.checkpoint.files import BLOCK_BYTES
from framework.checkpoint.snapshot import KeptBuffers, bytes_of, fingerprints, take
from tests.helpers.exact import tree_differences


def copied(state: Any, *, late: Sequence[Any] = ()) -> Any:
    snapshot = take(state, late=late, buffers=KeptBuffers())
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
