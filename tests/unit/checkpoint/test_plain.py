"""A state holds only what can be read back without running code."""

from __future__ import annotations

import io
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
    "numbers": [1, 2.5, True, None, 3 + 4j, float("inf"), 2**2039 - 1, -(2**2039) + 1],
    "texts": ("a", "ü", b"\x00\xff", bytearray(b"x")),
    "set": {1, 2},
    "ordered": OrderedDict(a=1),
    "counter": Counter([1, 1, 2]),
    "nested": {1: {"a": [{}]}, (1, "b"): []},
    "tensor": torch.arange(3),
    "parameter": nn.Parameter(torch.ones(2)),
    "half": torch.ones(2, dtype=torch.bfloat16),
    "sparse": torch.eye(3).to_sparse(),
    "kinds": [torch.Size([1, 2]), torch.device("cpu"), torch.float16],
}


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")
@pytest.mark.parametrize("name", PLAIN)
def test_what_is_accepted_is_really_read_back(name: str) -> None:
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
        (2**2039, "as text"),
    ],
)
def test_anything_else_is_refused_with_the_path_of_its_entry_and_advice(value: Any, advice: str) -> None:
    with pytest.raises(CheckpointError, match=r"at callbacks\.my_cb\[1\]\.model a .*") as caught:
        check_plain({"callbacks": {"my_cb": [{}, {"model": value}]}})
    assert caught.match(advice)
    assert len(str(caught.value).splitlines()) <= 4
    with pytest.raises(CheckpointError, match="at its top"):
        check_plain(value)


@pytest.mark.parametrize("value", [{torch.ones(1)}, {torch.ones(1): 1}, {(1, torch.ones(1)): 1}])
def test_a_tensor_that_would_be_found_by_its_hash_is_refused(value: Any) -> None:
    with pytest.raises(CheckpointError, match="a tensor, which nothing would find there"):
        check_plain({"mine": value})
    with pytest.raises(CheckpointError, match=r"at the key .* a pathlib"):
        check_plain({Path("a"): 1})
