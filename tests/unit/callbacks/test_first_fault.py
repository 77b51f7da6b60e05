"""What is said of a sample that is at fault."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from framework import MicroBatchInfo
from tests.helpers.internals import sample_of

INF = float("inf")


@pytest.mark.parametrize(
    ("mask", "length"),
    [
        (torch.tensor([[1, 1, 1], [1, 0, 0]]), 1),
        (torch.tensor([[True, True], [False, False]]), 0),
        (torch.tensor([[1.0, 1.0], [1.0, 0.0]]), 1),
        # Added to the scores of attention: 0 for tokens.
        (torch.tensor([[0.0, 0.0], [0.0, -INF]]), None),
        (torch.tensor([[0.0, -1e9], [0.0, 0.0]]), None),
        # One mask for all samples, and one for each pair of places.
        (torch.ones(1, 3), None),
        (torch.ones(2, 1, 3, 3), None),
    ],
)
def test_the_length_of_a_sample_is_read_from_masks_that_have_it(mask: Tensor, length: int | None) -> None:
    info = MicroBatchInfo({"attention_mask": mask}, 0, 2, torch.tensor([7, 9]))
    sample = sample_of(1, info)
    assert (sample.index, sample.length) == (9, length)
