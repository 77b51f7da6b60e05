"""A callback that changes frozen weights, as a momentum encoder does; and a task with a parameter of its own."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import mse_loss

from framework import Callback, FitInfo, StepInfo, StepOutput


class Drift(Callback):
    """Add 1 to net1's frozen bias after every step."""

    def on_fit_start(self, info: FitInfo) -> None:
        self.model = info.model

    @torch.no_grad()
    def on_train_step_end(self, info: StepInfo) -> None:
        self.model.get_parameter("net1.bias").add_(1)


class Scaled:
    """The mean squared error of an output that is multiplied by a learned number."""

    def __init__(self) -> None:
        self.scale = nn.Parameter(torch.ones(()))

    def training_step(self, model, batch):
        inputs, targets = batch
        return StepOutput(mse_loss(self.scale * model(inputs), targets), len(inputs))

    validation_step = training_step
