"""Exponential moving averages of the weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from framework.callbacks import EMAWeightAveraging
from framework.errors import ConfigError
from framework.types import FitInfo, StepInfo

State = dict[str, torch.Tensor]
# The callback doesn't look at it.
OPTIMIZER: Any = None


def new_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def start(callback: EMAWeightAveraging, model: nn.Module, *, step: int = 0) -> EMAWeightAveraging:
    callback.on_fit_start(
        FitInfo(model, start_step=step, total_steps=None, steps_per_epoch=10, max_epochs=None, optimizer=OPTIMIZER)
    )
    return callback


def train(callback: EMAWeightAveraging, model: nn.Module, steps: range) -> None:
    """Stands for optimizer steps: changes every parameter and, in the forward, the buffers."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator))
        model(torch.randn(8, 3, generator=generator))
        callback.on_train_step_end(StepInfo(step, 0, torch.zeros(()), 8))


def copy_of(model: nn.Module) -> State:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_equal(one: State, other: State) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def evaluated(callback: EMAWeightAveraging, model: nn.Module) -> State:
    with callback.evaluation_weights(model):
        return copy_of(model)


@pytest.mark.parametrize(
    ("keywords", "updated_after"),
    [
        ({}, [1, 2, 3, 4, 5, 6]),
        ({"update_every_n_steps": 2}, [1, 3, 5]),
        ({"update_starting_at_step": 3}, [4, 5, 6]),
        ({"update_every_n_steps": 2, "update_starting_at_step": 1}, [3, 5]),
    ],
)
def test_the_average_follows_the_formula(keywords: dict[str, Any], updated_after: list[int]) -> None:
    model = new_model()
    callback = start(EMAWeightAveraging(decay=0.9, **keywords), model)
    expected: State = {}
    for step in range(1, 7):
        train(callback, model, range(step, step + 1))
        if step in updated_after:
            state = {name: tensor.double() for name, tensor in copy_of(model).items() if tensor.is_floating_point()}
            expected = {name: 0.9 * expected[name] + 0.1 * state[name] if expected else state[name] for name in state}
    actual = evaluated(callback, model)
    for name, average in expected.items():
        torch.testing.assert_close(actual[name].double(), average, rtol=1e-5, atol=1e-6)
    assert len(expected) == 8, "parameters and BatchNorm's statistics"


def test_buffers_may_stay_the_models_own() -> None:
    model = new_model()
    callback = start(EMAWeightAveraging(decay=0.9, use_buffers=False), model)
    train(callback, model, range(1, 4))
    own = copy_of(model)
    average = evaluated(callback, model)
    buffers = {name for name, _ in model.named_buffers()}
    assert {name for name in own if torch.equal(own[name], average[name])} == buffers


def bits(model: nn.Module) -> State:
    return {name: tensor.clone().view(torch.uint8) for name, tensor in model.state_dict().items() if tensor.dim()}


def test_evaluation_restores_the_same_training_weights_in_place() -> None:
    model = new_model()
    callback = start(EMAWeightAveraging(decay=0.9), model)
    train(callback, model, range(1, 4))
    with torch.no_grad():
        model[0].weight[0, :2] = torch.tensor([float("nan"), -0.0])  # type: ignore[index]
    before = bits(model)
    addresses = [tensor.data_ptr() for tensor in model.state_dict().values()]
    average = evaluated(callback, model)
    with pytest.raises(ZeroDivisionError), callback.evaluation_weights(model):
        raise ZeroDivisionError
    assert_equal(bits(model), before)
    assert addresses == [tensor.data_ptr() for tensor in model.state_dict().values()]
    assert_equal(evaluated(callback, model), average)


def test_before_an_update_the_model_is_evaluated() -> None:
    model = new_model()
    callback = start(EMAWeightAveraging(update_starting_at_step=100), model)
    train(callback, model, range(1, 4))
    assert_equal(evaluated(callback, model), copy_of(model))
    assert callback.state_dict() == {"num_averaged": 0}


def test_wrong_settings_are_refused() -> None:
    for keywords in ({"decay": 1.1}, {"decay": -0.1}, {"update_every_n_steps": 0}):
        with pytest.raises(ConfigError, match=next(iter(keywords))):
            EMAWeightAveraging(**keywords)
