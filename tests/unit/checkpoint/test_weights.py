from __future__ import annotations

import pytest
import torch
from torch import nn

from framework.checkpoint import load_weights
from framework.errors import CheckpointError


def test_weights_are_copied() -> None:
    source, target = nn.Linear(3, 2), nn.Linear(3, 2)
    load_weights(target, source.state_dict(), source="a")
    assert torch.equal(target.weight, source.weight)
    assert torch.equal(target.bias, source.bias)


def test_other_shapes_and_names_are_told() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(2, 2)})
    given = nn.ModuleDict({"a": nn.Linear(4, 2), "c": nn.Linear(2, 2)}).state_dict()
    with pytest.raises(CheckpointError) as caught:
        load_weights(model, given, source="run/best")
    message = str(caught.value)
    assert "run/best" in message
    assert "a.weight: the model has [2, 3], the checkpoint [2, 4]" in message
    assert "not in the checkpoint: b.weight, b.bias" in message
    assert "not in the model: c.weight, c.bias" in message
    assert "a.bias" not in message


def test_many_differences_stay_a_few_lines() -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(50)))
    given = nn.Sequential(*(nn.Linear(3, 4) for _ in range(50)), nn.Linear(1, 1)).state_dict()
    with pytest.raises(CheckpointError, match="and 96 more with other shapes") as caught:
        load_weights(model, given, source="x")
    assert len(str(caught.value).splitlines()) <= 9
    with pytest.raises(CheckpointError, match=r"0\.weight, 0\.bias, 1\.weight, 1\.bias … and 96 more"):
        load_weights(model, {}, source="x")


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
def test_weights_of_a_wrapped_model_are_told_apart(prefix: str) -> None:
    given = {prefix + name: value for name, value in nn.Linear(3, 2).state_dict().items()}
    with pytest.raises(CheckpointError, match=f"without the prefix '{prefix}'"):
        load_weights(nn.Linear(3, 2), given, source="x")
