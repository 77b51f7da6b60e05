"""What is tried before the first step, and what is said of a task that returns something else than it should."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from framework.errors import TargetError
from framework.predictions import columns_of
from framework.trainer import Trainer
from framework.types import StepOutput
from tests.unit.small_trainer import Numbers, Squares, assert_equal, make_trainer, samples, settings, weights

pytestmark = pytest.mark.usefixtures("own_state")


class Noisy(Squares):
    """Draws numbers in each step, and counts validation steps."""

    def __init__(self) -> None:
        self.validations = 0

    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        return super().training_step(model, [batch[0] + torch.randn(()), batch[1]])

    def validation_step(self, model: nn.Module, batch: Any) -> StepOutput:
        self.validations += 1
        output = self.training_step(model, batch)
        return output._replace(metrics={"masked": (torch.tensor(0.0), torch.tensor(0))})


class Counts(nn.Linear):
    """A model with a buffer that every forward changes, in evaluation too."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(3, 1)
        self.forwards: torch.Tensor
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        return super().forward(inputs) + self.forwards / 100


def made(numbers: Numbers | None = None, **changes: Any) -> Trainer:
    loggers = {} if numbers is None else {"numbers": numbers}
    trainer = make_trainer(settings(**changes), model=Counts(), task=Noisy(), loggers=loggers, val=samples(12))
    torch.manual_seed(6)
    return trainer


def test_it_runs_the_first_batches_and_changes_nothing() -> None:
    plain, numbers = made(), Numbers()
    plain.fit()
    checked = made(numbers, num_sanity_val_steps=2)
    assert checked.sanity_check() == ["val/loss", "val/masked"]  # also of a metric without samples in these batches
    assert vars(checked.parts.task)["validations"] == 2
    assert numbers.logged == []
    assert checked.parts.bare_model.training
    checked.fit()
    assert_equal(weights(checked), weights(plain))


@pytest.mark.parametrize(
    "changes", [{"num_sanity_val_steps": 0}, {"check_val_every_n_epoch": None}, {"max_steps": 1}], ids=str
)
def test_it_is_left_out_where_there_is_nothing_to_check(changes: dict[str, Any]) -> None:
    trainer = made(**changes)
    if "max_steps" in changes:  # as in a resumed run
        trainer.fit()
    assert trainer.sanity_check() == []
    assert vars(trainer.parts.task)["validations"] == 0


LOSS = torch.zeros((), requires_grad=True)


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (LOSS, r"returned a tensor of shape \(\), float32. It must return framework.StepOutput"),
        ({"loss": LOSS}, r"returned a mapping with the keys \['loss'\]"),
        (None, "returned None"),
        (StepOutput(0.5, 4), "returned a loss that is a float"),  # type: ignore[arg-type]
        (StepOutput(LOSS, 4, {"loss": (1.0, 4)}), "a metric called 'loss'. Its name must be a str other than 'loss'"),
        (StepOutput(LOSS, 4, {3: (1.0, 4)}), "a metric called 3"),  # type: ignore[dict-item]
        (StepOutput(torch.zeros(4), 4), r"returned a loss that is a tensor of shape \(4,\)"),
        (StepOutput(LOSS, torch.tensor(4)), "returned a num_samples that is a tensor"),  # type: ignore[arg-type]
        (StepOutput(LOSS, 4, {"acc": 0.5}), "the metric 'acc' as a float"),  # type: ignore[dict-item]
        (StepOutput(LOSS, 4, {"acc": torch.tensor(0.5)}), r"the metric 'acc' as a tensor of shape \(\)"),  # type: ignore[dict-item]
        (StepOutput(LOSS, 4, {"acc": nn.Identity()}), r"the metric 'acc' as an? Identity"),  # type: ignore[dict-item]
        (StepOutput(LOSS, 4, {"acc": (torch.tensor(1j), 4)}), "the metric 'acc' as a tuple of 2"),
        (StepOutput(LOSS, 4, {"acc": (torch.zeros(3), 4)}), r"It must be a pair \(sum over samples, count\)"),
    ],
)
@pytest.mark.parametrize("method", ["training_step", "validation_step"])
def test_what_a_step_returns_is_checked_once(method: str, output: Any, said: str) -> None:
    task = type("Wrong", (Squares,), {method: lambda *_: output})()
    trainer = make_trainer(task=task, val=samples(7))
    check = trainer.fit if method == "training_step" else trainer.sanity_check
    with pytest.raises(TargetError, match=f"^Wrong.{method} {said}" if "returned" in said else said):
        check()
    assert trainer.progress.step == 0


def test_a_loss_without_a_gradient_is_refused_in_training() -> None:
    detached = StepOutput(torch.zeros(()), 4)
    trainer = make_trainer(task=type("Cut", (Squares,), {"training_step": lambda *_: detached})())
    with pytest.raises(TargetError, match=r"^Cut\.training_step returned a loss that doesn't depend on a trained"):
        trainer.fit()


def test_what_predict_step_returns_is_checked() -> None:
    wrong: Any = 0.5
    with pytest.raises(TargetError, match=r"predict_step returned a float\. It must return a tensor, or a dict of"):
        columns_of(wrong, num_samples=4)
