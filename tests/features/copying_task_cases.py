"""Tasks that copy the model in their constructor: one copy follows the model, the other stays as it was."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from framework import Batch, Datasets, StepInfo, StepOutput
from tests.features.optimizer_cases import points


class Follower(nn.Module):
    """Evaluates a momentum encoder."""

    def __init__(self, model: nn.Module, momentum: float = 0.9) -> None:
        super().__init__()
        self.model = model
        self.momentum = momentum
        self.target = copy.deepcopy(model).requires_grad_(False)

    def training_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        x, y = batch
        return StepOutput(mse_loss(model(x), y), len(x))

    def validation_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        x, y = batch
        return StepOutput(mse_loss(self.target(x), y), len(x))

    @torch.no_grad()
    def on_train_step_end(self, info: StepInfo) -> None:
        for slow, fast in zip(self.target.parameters(), self.model.parameters(), strict=True):
            slow.lerp_(fast, 1 - self.momentum)


class Reference:
    """Stays near the model that it begins with, which no checkpoint has, and has nothing to evaluate with."""

    def __init__(self, model: nn.Module) -> None:
        self.reference = copy.deepcopy(model).requires_grad_(False)

    def training_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        x, y = batch
        guesses = model(x)
        return StepOutput(mse_loss(guesses, y) + mse_loss(guesses, self.reference(x)), len(x))


class Other(nn.Module):
    """Evaluates the model itself, and has a state of other names."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def training_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        x, y = batch
        return StepOutput(self.scale * mse_loss(model(x), y), len(x))

    validation_step = training_step


def parts(*names: str) -> Datasets:
    """Return the points as the train part and as these."""
    samples = points().train
    given: dict[str, Any] = dict.fromkeys(names, samples)
    return Datasets(train=samples, **given)
