"""Optimizers whose step computes the loss itself, and a task whose loss is weighted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from framework import Batch, StepOutput


class SAM(torch.optim.SGD):
    """Sharpness-aware minimization (Foret et al. 2021): it ascends by the gradients that are there, then descends."""

    def __init__(self, params: Iterable[Tensor], *, lr: float, rho: float = 0.05) -> None:
        super().__init__(params, lr=lr, momentum=0.9)
        self.rho = rho

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is not None
        parameters: list[Tensor] = [
            parameter for group in self.param_groups for parameter in group["params"] if parameter.grad is not None
        ]
        gradients = [parameter.grad.clone() for parameter in parameters]  # type: ignore[union-attr]
        scale = self.rho / torch.stack([gradient.norm() for gradient in gradients]).norm()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.add_(gradient * scale)
        closure()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.sub_(gradient * scale)
        super().step()


class Weighted:
    """A mean over weighted samples; `noise` drops inputs, the same ones in each pass of a step."""

    def __init__(self, noise: float = 0.0) -> None:
        self.noise = noise

    def training_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        x, y = batch
        return self._output(model(dropout(x, self.noise)), x, y)

    def validation_step(self, model: nn.Module, batch: Batch) -> StepOutput:
        x, y = batch
        return self._output(model(x), x, y)

    def _output(self, guesses: Tensor, x: Tensor, y: Tensor) -> StepOutput:
        weights = x[:, 0].abs()
        errors = (guesses - y).square().mean(dim=1)
        # In one dimension, as some code adds its losses up.
        loss = (errors * weights).sum(dim=0, keepdim=True) / weights.sum()
        return StepOutput(loss, len(x), weight=weights.sum())
