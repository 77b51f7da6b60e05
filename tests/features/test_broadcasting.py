"""Losses of outputs and targets of different shapes, of which torch only warns or says nothing."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

from framework import StepOutput
from framework.errors import DataError
from framework.tasks import Supervised
from tests.helpers import results

SHORT = ("recipe=toy", "logger=jsonl", "checkpoint=none", "trainer.max_steps=2", "trainer.log_every_n_steps=1")


class Own:
    """A task that compares one output of a sample with a target of another shape."""

    def __init__(self, loss, one_target=False, in_validation=False):
        # As scripts begin that want to see no warnings.
        warnings.simplefilter("ignore")
        self.loss = getattr(functional, loss)
        self.one_target = one_target
        self.in_validation = in_validation

    def training_step(self, model, batch):
        inputs, targets = batch
        output = model(inputs)[:, :1]
        target = torch.ones(1) if self.one_target else targets[:, 0]
        if self.in_validation and model.training:
            target = target.unsqueeze(1)
        return StepOutput(self.loss(output, target), len(inputs))

    validation_step = training_step


def task(loss, **keywords):
    given = [f"+task.{name}={value}" for name, value in {"loss": loss, **keywords}.items()]
    return ("~task", f"+task._target_={__name__}.Own", *given)


@pytest.mark.parametrize(
    "loss",
    [
        "mse_loss",
        "l1_loss",
        pytest.param("smooth_l1_loss", marks=pytest.mark.exhaustive),
        pytest.param("huber_loss", marks=pytest.mark.exhaustive),
    ],
)
def test_any_task_refuses_a_broadcasting_loss(train, capfd, loss):
    train(*SHORT, *task(loss), "trainer.num_sanity_val_steps=0", status=2)
    error = capfd.readouterr().err
    assert "an output of shape (20, 1) and a target of shape (20)" in error
    assert "test_broadcasting.py, line" in error
    assert "in training_step: return StepOutput(self.loss(output, target), len(inputs))" in error


def test_so_it_is_in_validation(train, capfd):
    for sanity in (0, 1):
        train(
            *SHORT,
            *task("mse_loss", in_validation=True),
            f"trainer.num_sanity_val_steps={sanity}",
            "trainer.val_check_interval=1",
            status=2,
        )
        assert "broadcasting would compare wrong pairs" in capfd.readouterr().err


def test_one_target_for_all_is_no_mistake(train):
    run_dir = train(*SHORT, *task("mse_loss", one_target=True))
    assert len(results.curve(run_dir, "train/loss")) == 2


@pytest.mark.parametrize(
    "loss",
    [
        nn.MSELoss(),
        nn.SmoothL1Loss(),
        nn.PoissonNLLLoss(),
        nn.SoftMarginLoss(),
        nn.HingeEmbeddingLoss(),
        nn.MultiLabelSoftMarginLoss(),
        nn.BCEWithLogitsLoss(),
        functional.mse_loss,
        functional.poisson_nll_loss,
        functional.soft_margin_loss,
    ],
    ids=lambda loss: getattr(loss, "__name__", str(loss)),
)
def test_supervised_refuses_every_loss_that_broadcasts(loss):
    batch = [torch.ones(4, 3), torch.ones(4)]
    with pytest.raises(DataError, match=r"output: a tensor of shape \(4, 1\)"):
        Supervised(loss).training_step(nn.Linear(3, 1), batch)
