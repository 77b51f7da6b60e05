"""What a task returns of a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from framework import StepOutput


@pytest.mark.parametrize("name", ["metrics", "updates"])
def test_nothing_can_be_added_to_all_outputs_at_once(name: str) -> None:
    output = StepOutput(torch.zeros(()), num_samples=1)
    shared: Any = getattr(output, name)
    with pytest.raises(TypeError, match="does not support item assignment"):
        shared["rouge"] = (1.0, 1)
    assert getattr(StepOutput(torch.zeros(()), num_samples=1), name) == {}
