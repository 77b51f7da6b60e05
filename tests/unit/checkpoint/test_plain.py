from __future__ import annotations

import io
import subprocess
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from framework.checkpoint import check_plain
from framework.errors import CheckpointError


class Colour(Enum):
    RED = 1


class Branded(torch.Tensor):
    pass


PLAIN: Mapping[str, Any] = {
    "numbers": [1, 2.5, True, None, 3 + 4j, 2**80, float("inf")],
    "texts": ("a", "ü", b"\x00\xff", bytearray(b"x")),
    "set": {1, 2},
    "ordered": OrderedDict(a=1),
    "counter": Counter([1, 1, 2]),
    "nested": {1: {"a": [{}]}, (1, "b"): []},
    "tensor": torch.arange(3),
    "parameter": nn.Parameter(torch.ones(2)),
    "half": torch.ones(2, dtype=torch.bfloat16),
    "sparse": torch.eye(3).to_sparse(),
    "size": torch.Size([1, 2]),
    "device": torch.device("cpu"),
    "dtype": torch.float16,
}


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")
@pytest.mark.parametrize("name", PLAIN)
def test_what_passes_is_really_read_back(name: str) -> None:
    value = {"entry": PLAIN[name]}
    check_plain(value)
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    read = torch.load(file, weights_only=True)["entry"]
    assert type(read) is type(PLAIN[name])
    if isinstance(read, torch.Tensor):
        torch.testing.assert_close(read, PLAIN[name], rtol=0, atol=0)
    else:
        assert read == PLAIN[name]


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (nn.Linear(1, 1), r"state_dict\(\)"),
        (np.float64(1.0), r"\.item\(\)"),
        (np.zeros(2), "torch.from_numpy"),
        (Path("a"), r"str\(path\)"),
        (defaultdict(int), r"dict\(\.\.\.\)"),
        (Colour.RED, "plain values"),
        (torch.ones(1).as_subclass(Branded), "as_subclass"),
        (lambda: None, "plain values"),
        (frozenset({1}), "plain values"),
        (subprocess, "plain values"),
    ],
)
def test_anything_else_is_refused_by_the_path_of_its_entry(value: Any, advice: str) -> None:
    with pytest.raises(CheckpointError, match=r"at callbacks\.my_cb\.model a .*") as caught:
        check_plain({"callbacks": {"my_cb": {"model": value}}})
    assert caught.match(advice)
    assert len(str(caught.value).splitlines()) <= 4


def test_the_path_goes_through_lists_and_other_keys() -> None:
    with pytest.raises(CheckpointError, match=r"at generators\[1\]\[0\]\.a a "):
        check_plain([{}, {0: {"a": object()}}], name="generators")
    with pytest.raises(CheckpointError, match=r"at the key .* a pathlib"):
        check_plain({Path("a"): 1})
    with pytest.raises(CheckpointError, match=r"at its top a builtins\.object"):
        check_plain(object())


def test_a_number_that_is_too_large_to_be_read_back_is_refused(tmp_path: Path) -> None:
    torch.save([2**2039 - 1, -(2**2039) + 1], tmp_path / "largest.pt")
    assert torch.load(tmp_path / "largest.pt", weights_only=True) == [2**2039 - 1, -(2**2039) + 1]
    check_plain([2**2039 - 1])
    with pytest.raises(CheckpointError, match=r"at \[0\] a whole number of 2040 bits"):
        check_plain([2**2039])


@pytest.mark.parametrize("value", [{torch.ones(1)}, {torch.ones(1): 1}, {(1, torch.ones(1)): 1}])
def test_a_tensor_that_would_be_found_by_its_hash_is_refused(value: Any) -> None:
    with pytest.raises(CheckpointError, match="a tensor, which nothing would find there"):
        check_plain({"mine": value})
