"""Lightning's WeightAveraging: its own arithmetic and its `should_update`, in our evaluations and checkpoints."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_swa_avg_fn

from framework.callbacks.weight_average import UpdateAverages, WeightAverage
from framework.types import Callback, EpochInfo, FitInfo, StepInfo


@final
class LightningAveraging(Callback):
    """Average the weights when a WeightAveraging of Lightning says so.

    Args:
        averaging: Lightning's callback, or a subclass that overrides `should_update`.
        trainer: the view that the module has, which counts the steps of all optimizers.
    """

    averages_buffers_by: ClassVar = "use_buffers"
    # The ranks' buffers differ until they are evaluated.
    state_is_rank_zero: ClassVar = True

    def __init__(self, averaging: Any, trainer: Any) -> None:
        self.use_buffers: bool = averaging._use_buffers
        self._should_update = averaging.should_update
        self._update_averages = _arithmetic(averaging._kwargs)
        self._trainer = trainer
        # The last step and epoch after which the average was updated, as Lightning notes them.
        self._last_step = 0
        self._last_epoch = -1
        # The state of a checkpoint, until there is a copy of the model to load it into.
        self._loaded: dict[str, Any] | None = None
        self._average: WeightAverage

    def on_fit_start(self, info: FitInfo) -> None:
        self._average = WeightAverage(info.model, update_averages=self._update_averages, use_buffers=self.use_buffers)
        if self._loaded is not None:
            self._average.load_state_dict(self._loaded)
            self._last_step = self._loaded["last_step"]
            self._last_epoch = self._loaded["last_epoch"]
        self._loaded = None

    def on_train_step_end(self, info: StepInfo) -> None:
        step = self._trainer.global_step
        if step > self._last_step and self._should_update(step_idx=step - 1):
            self._average.update()
            self._last_step = step

    def on_train_epoch_end(self, info: EpochInfo) -> None:
        if info.epoch > self._last_epoch and self._should_update(epoch_idx=info.epoch):
            self._average.update()
            self._last_epoch = info.epoch

    def evaluation_weights(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which `model` holds the average."""
        return self._average.swapped_in(model)

    def state_dict(self) -> dict[str, Any]:
        return {**self._average.state_dict(), "last_step": self._last_step, "last_epoch": self._last_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the state for `on_fit_start`, which comes after this."""
        self._loaded = state


def _arithmetic(arguments: dict[str, Any]) -> UpdateAverages:
    """Return how averages are updated, from the arguments that `torch.optim.swa_utils.AveragedModel` would get."""
    multi_avg_fn = arguments.get("multi_avg_fn")
    avg_fn = arguments.get("avg_fn") or get_swa_avg_fn()

    def update(averages: list[Tensor], currents: list[Tensor], num_averaged: int) -> None:
        number = torch.tensor(num_averaged)
        if multi_avg_fn is not None:
            multi_avg_fn(averages, currents, number)
            return
        for average, current in zip(averages, currents, strict=True):
            average.copy_(avg_fn(average, current, number))

    return update
