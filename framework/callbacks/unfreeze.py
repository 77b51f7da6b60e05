"""Trains frozen parameters from an epoch or step on."""

from __future__ import annotations

from typing import Any, final

from torch import nn

from framework.errors import ConfigError
from framework.strategies.parameters import chosen
from framework.types import Callback, EpochInfo, FitInfo, StepInfo


@final
class Unfreeze(Callback):
    """Train the parameters that match `params`, frozen by `model.freeze`, from an epoch or a step on.

    Their optimizer state begins then; the optimizer and group that `optimizer` gives them have been theirs all along.

    Args:
        params: Patterns as of `model.freeze`.
        at_epoch: Before the first step of this epoch, counted from 0.
        at_step: After this many optimizer steps.
    """

    def __init__(self, params: Any, at_epoch: int | None = None, at_step: int | None = None) -> None:
        if (at_epoch is None) is (at_step is None):
            raise ConfigError(f"Unfreeze: at_epoch={at_epoch} and at_step={at_step}. Give one of them.")
        self._params = params
        self._at_epoch = at_epoch
        self._at_step = at_step
        self._parameters: list[nn.Parameter] = []

    def on_fit_start(self, info: FitInfo) -> None:
        self._parameters = chosen(info.model, self._params, key="Unfreeze: params")

    def on_train_epoch_start(self, info: EpochInfo) -> None:
        if info.epoch == self._at_epoch:
            self._unfreeze()

    def on_train_step_end(self, info: StepInfo) -> None:
        if info.step == self._at_step:
            self._unfreeze()

    def _unfreeze(self) -> None:
        for parameter in self._parameters:
            parameter.requires_grad_(True)
