"""Number formats: of the model, batches, the task and what is computed; memory formats; scaled losses."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from framework.tasks import Supervised
from tests.helpers.internals import PrecisionPlugin

CPU = torch.device("cpu")


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def small() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, 3))


def test_batches_keep_their_form_and_only_floats_change():
    batch: dict[str, Any] = {
        "pair": Pair(torch.ones(2), torch.ones(2, dtype=torch.int64)),
        "list": [torch.ones(1), "name", None],
    }
    assert PrecisionPlugin("bf16-mixed", device=CPU).convert_batch(batch) is batch
    changed = PrecisionPlugin("bf16-true", device=CPU).convert_batch(batch)
    assert isinstance(changed["pair"], Pair)
    assert (changed["pair"].x.dtype, changed["pair"].y.dtype) == (torch.bfloat16, torch.int64)
    assert changed["list"][0].dtype == torch.bfloat16
    assert changed["list"][1:] == ["name", None]


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_channels_last_changes_no_number(own_state, precision):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, 3))
    image_BCHW = torch.randn(4, 1, 8, 8)
    wide_BCHW = torch.randn(4, 3, 5, 5)
    plain = PrecisionPlugin(precision, device=CPU)
    plugin = PrecisionPlugin(precision, device=CPU, channels_last=True)
    expected = plain.convert_model(model)(plain.convert_batch(image_BCHW))
    changed = plugin.convert_model(model)
    assert dict(changed.named_parameters())["0.weight"].is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(changed(plugin.convert_batch(image_BCHW)), expected)
    batch = plugin.convert_batch({"image": wide_BCHW, "label": torch.arange(4), "mean": torch.ones(4, 2)})
    assert batch["image"].stride() == (75, 1, 15, 3)
    assert torch.equal(batch["image"], plain.convert_batch(wide_BCHW))
    assert torch.equal(batch["label"], torch.arange(4))
    assert batch["mean"].dtype == batch["image"].dtype


class OwnLoss(nn.Module):
    """A task that is a module, with a loss in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.losses = nn.ModuleList([weighted()])

    def training_step(self, model: Any, batch: Any) -> Any: ...
    def validation_step(self, model: Any, batch: Any) -> Any: ...


class Plain:
    """A task that isn't one."""

    def __init__(self) -> None:
        self.losses = {"first": [weighted()]}

    training_step = validation_step = OwnLoss.training_step


def weighted() -> nn.Module:
    return nn.CrossEntropyLoss(weight=torch.ones(3))


@pytest.mark.parametrize(
    ("task", "loss"),
    [
        (Supervised(weighted()), lambda task: task.loss),
        (Supervised(nn.MSELoss(), metrics={"other": weighted()}), lambda task: task.metrics["other"]),
        (OwnLoss(), lambda task: task.losses[0]),
        (Plain(), lambda task: task.losses["first"][0]),
    ],
)
def test_task_modules_take_the_precisions_type(task, loss):
    assert PrecisionPlugin("64-true", device=torch.device("meta")).convert_task(task, model=nn.Identity()) is task
    assert (loss(task).weight.device.type, loss(task).weight.dtype) == ("meta", torch.float64)
