"""Tasks that train parameters of their own beside the model's."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from framework import Batch, StepOutput


class LearnedWeights(nn.Module):
    """Weights two losses by learned variances (Kendall et al. 2018, eq. 7). Has the model and a frozen part, too."""

    def __init__(self, *, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.log_variances = nn.Parameter(torch.zeros(2))
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def training_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        x, y = batch
        guesses = model(x)
        losses = torch.stack([mse_loss(guesses[:, 0], y[:, 0]), mse_loss(guesses[:, 1], y[:, 1])])
        return StepOutput((losses * torch.exp(-self.log_variances) + self.log_variances).sum(), len(x))

    validation_step = training_step


class WithCritic:
    """A second head, which the task keeps, as a plain object."""

    def __init__(self) -> None:
        self.critic = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
        self.scale = nn.Parameter(torch.ones(1))

    def training_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        x, y = batch
        guesses = model(x)
        error = (guesses - y).square().mean(dim=1, keepdim=True)
        return StepOutput(error.mean() + mse_loss(self.scale * self.critic(guesses), error.detach()), len(x))

    validation_step = training_step


class InAList(WithCritic):
    def __init__(self) -> None:
        super().__init__()
        self.critics = [nn.Linear(2, 1)]


class LooseTensor(WithCritic):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = torch.ones((), requires_grad=True)


class CallsItsOwn(WithCritic):
    """Calls the model that it keeps, which no strategy has wrapped."""

    def __init__(self, *, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        return super().training_step(self.model, batch)

    def validation_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        return super().training_step(self.model, batch)


def loss_of(task: LearnedWeights | WithCritic, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return task.training_step(model, batch).loss
