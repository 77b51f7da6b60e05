"""An exponential moving average of the weights, evaluated and saved in their place."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from framework.errors import ConfigError
from framework.types import FitInfo, StepReport


@final
@dataclass(eq=False)
class EMAWeightAveraging:
    """Keep average = decay · average + (1 - decay) · weights, starting from the weights, as Lightning's callback does.

    Updated after step s if (s - 1) is a multiple of `update_every_n_steps` and at least `update_starting_at_step`.
    use_buffers: average the buffers (BatchNorm's statistics) too; without it the model's own are used. Every rank keeps
    one copy of the model, on the model's devices. Before the first update the model is evaluated and saved as it is.
    """

    # Not `AveragedModel`: its `update_parameters` copies a count to the GPU, and waits for that, in every step.

    averages_buffers_by: ClassVar = "use_buffers"

    decay: float = 0.999
    update_every_n_steps: int = 1
    update_starting_at_step: int | None = None
    use_buffers: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.decay <= 1:
            raise ConfigError(f"EMAWeightAveraging: decay={self.decay} is not between 0 and 1.")
        if self.update_every_n_steps < 1:
            raise ConfigError(f"EMAWeightAveraging: update_every_n_steps={self.update_every_n_steps} is below 1.")
        self._update_average = get_ema_multi_avg_fn(self.decay)
        self._num_averaged = 0
        self._loaded: dict[str, Any] | None = None  # until there is a copy of the model to load it into
        self._model: nn.Module
        self._averaged: nn.Module

    def on_fit_start(self, info: FitInfo) -> None:
        self._model = info.model
        self._averaged = copy.deepcopy(info.model).requires_grad_(False)
        if self._loaded is not None and self._loaded["num_averaged"]:
            self._num_averaged = self._loaded["num_averaged"]
            self._averaged.load_state_dict(self._loaded["average"])
        self._loaded = None

    @torch.no_grad()
    def on_train_step_end(self, report: StepReport) -> None:
        index = report.step - 1
        if index < (self.update_starting_at_step or 0) or index % self.update_every_n_steps:
            return
        pairs = list(zip(self._tensors(self._averaged), self._tensors(self._model), strict=True))
        if self._num_averaged == 0:
            for average, current in pairs:
                average.copy_(current)
        else:
            for is_float in (True, False):  # buffers of integers are averaged by another rule
                of_kind = [pair for pair in pairs if (pair[0].is_floating_point() or pair[0].is_complex()) is is_float]
                if of_kind:
                    averages, currents = map(list, zip(*of_kind, strict=True))
                    self._update_average(averages, currents, self._num_averaged)
        if not self.use_buffers:
            for average, current in zip(self._averaged.buffers(), self._model.buffers(), strict=True):
                average.copy_(current)
        self._num_averaged += 1

    @contextmanager
    def evaluation_weights(self, model: nn.Module) -> Iterator[None]:
        """Swap the average into `model`, and afterwards the training weights back, bit for bit.

        Values are swapped in place: addresses stay, which captured graphs and compiled code rely on, and the extra
        memory is that of one tensor.
        """
        if self._num_averaged == 0:
            yield
            return
        self._swap(model)
        try:
            yield
        finally:
            self._swap(model)

    def state_dict(self) -> dict[str, Any]:
        """Return the average, its live tensors, and its number of updates. Not within `evaluation_weights`."""
        if self._num_averaged == 0:
            return {"num_averaged": 0}
        return {"num_averaged": self._num_averaged, "average": dict(self._averaged.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the state for `on_fit_start`, which comes after this."""
        self._loaded = state

    @torch.no_grad()
    def _swap(self, model: nn.Module) -> None:
        for own, average in zip(self._tensors(model), self._tensors(self._averaged), strict=True):
            kept = own.detach().clone()
            own.copy_(average)
            average.copy_(kept)

    def _tensors(self, model: nn.Module) -> Iterator[Tensor]:
        return chain(model.parameters(), model.buffers() if self.use_buffers else ())
