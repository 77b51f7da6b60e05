from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from framework.data.device import pins_memory, to_device

META = torch.device("meta")


class Pair(NamedTuple):
    image: Tensor
    label: Tensor


def test_tensors_at_any_depth_are_moved_and_the_rest_is_kept():
    batch = {
        "pair": Pair(torch.zeros(2, 3), torch.ones(2)),
        "list": [torch.zeros(2), (torch.zeros(1), "name", 3)],
        "ordered": OrderedDict(x=torch.zeros(4)),
        "nothing": None,
    }
    moved = to_device(batch, META)
    assert isinstance(moved["pair"], Pair)
    assert moved["pair"].image.device == moved["pair"].label.device == META
    assert moved["pair"].image.shape == (2, 3)
    assert moved["list"][0].device == META
    assert isinstance(moved["list"][1], tuple)
    assert moved["list"][1][0].device == META
    assert moved["list"][1][1:] == ("name", 3)
    assert moved["ordered"]["x"].device == META
    assert moved["nothing"] is None


def test_a_tensor_that_is_there_already_is_not_copied():
    tensor = torch.zeros(3)
    assert to_device(tensor, torch.device("cpu")) is tensor


@pytest.mark.parametrize(("kind", "expected"), [("cpu", False), ("mps", False), ("cuda", True), ("xpu", True)])
def test_memory_is_pinned_only_where_copies_gain_from_it(kind, expected):
    assert pins_memory(torch.device(kind)) is expected
