"""A state holds only what can be read back without running code."""

from __future__ import annotations

import io
from collections import Counter, OrderedDict, defaultdict
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from framework.errors import CheckpointError
from tests.helpers.exact import tree_differences
from tests.helpers.internals import check_plain


class Colour(Enum):
    RED = 1


class Branded(torch.Tensor):
    pass


def test_what_is_accepted_is_really_read_back() -> None:
    value = {
        "numbers": [1, 2.5, True, None, 3 + 4j, float("inf")],
        "texts": ("a", "ü", b"\x00\xff", bytearray(b"x")),
        "collections": [{1, 2}, OrderedDict(a=1), Counter([1, 1, 2])],
        "nested": {1: {"a": [{}]}, (1, "b"): []},
        "tensors": [torch.arange(3), nn.Parameter(torch.ones(2)), torch.ones(2, dtype=torch.bfloat16)],
        "kinds": [torch.Size([1, 2]), torch.device("cpu"), torch.float16],
    }
    check_plain(value)
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    assert tree_differences(torch.load(file, weights_only=True), value) == []


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (nn.Linear(1, 1), r"state_dict\(\)"),
        (np.float64(1.0), r"\.item\(\)"),
        (np.zeros(2), "torch.from_numpy"),
        (Path("a"), r"str\(path\)"),
        (defaultdict(int), r"dict\(mapping\)"),
        (Colour.RED, "numbers, strings"),
        (torch.ones(1).as_subclass(Branded), "Branded"),
    ],
)
def test_anything_else_is_refused_with_its_path(value: Any, advice: str) -> None:
    with pytest.raises(CheckpointError, match=r"at callbacks\.my_cb\[1\]\.model a .*") as caught:
        check_plain({"callbacks": {"my_cb": [{}, {"model": value}]}})
    assert caught.match(advice)
    with pytest.raises(CheckpointError, match="at its top"):
        check_plain(value)


def test_a_key_is_looked_at_too() -> None:
    with pytest.raises(CheckpointError, match=r"at the key .* a pathlib"):
        check_plain({Path("a"): 1})
