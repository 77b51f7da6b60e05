"""An exponential moving average of the weights, to evaluate and to keep in their place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from framework.errors import CheckpointError, ConfigError
from framework.types import FitInfo, StepReport


@final
class EMAWeightAveraging:
    """Keeps average = decay · average + (1 - decay) · weights, begun with a copy of the weights, as Lightning's.

    Updated after step s where (s - 1) is a multiple of `update_every_n_steps` and at least `update_starting_at_step`.
    use_buffers: average the buffers (BatchNorm's statistics) too; without it the model's own are used. Every rank keeps
    one copy of the model, on the model's devices. Before the first update there is no average: the model is evaluated
    and kept as it is.
    """

    averages_buffers_by = "use_buffers"

    def __init__(
        self,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        use_buffers: bool = True,
    ) -> None:
        if not 0 <= decay <= 1:
            raise ConfigError(f"EMAWeightAveraging: decay={decay} is not between 0 and 1.")
        if update_every_n_steps < 1:
            raise ConfigError(f"EMAWeightAveraging: update_every_n_steps={update_every_n_steps} is below 1.")
        self._average = get_ema_multi_avg_fn(decay)
        self._every = update_every_n_steps
        self._first_index = update_starting_at_step or 0
        self._use_buffers = use_buffers
        self._model: nn.Module | None = None
        self._averaged: AveragedModel | None = None
        self._swapped = False
        self._loaded: dict[str, Any] | None = None  # until there is a model to load it into

    def on_fit_start(self, info: FitInfo) -> None:
        self._model = info.model
        self._averaged = AveragedModel(info.model, multi_avg_fn=self._average, use_buffers=self._use_buffers)
        self._averaged.requires_grad_(False)
        if self._loaded is not None:
            self._restore(self._averaged, self._loaded)
            self._loaded = None

    def on_train_step_end(self, report: StepReport) -> None:
        index = report.step - 1
        if index >= self._first_index and index % self._every == 0:
            assert self._averaged is not None
            assert self._model is not None
            self._update(self._averaged, self._model)

    @contextmanager
    def evaluation_weights(self, model: nn.Module) -> Iterator[None]:
        """Swap the average into `model`, and afterwards the training weights back, bit for bit.

        Values are swapped in place: addresses stay, which captured graphs and compiled code rely on, and one tensor of
        memory is all it takes. Entering it again inside changes nothing.
        """
        if self._num_averaged() == 0 or self._swapped:
            yield
            return
        self._swap(model)
        self._swapped = True
        try:
            yield
        finally:
            self._swapped = False
            self._swap(model)

    def state_dict(self) -> dict[str, Any]:
        """The average and how many updates are in it. Its tensors are the live ones, not copies."""
        if self._averaged is None:
            return self._loaded or {"num_averaged": 0}
        if self._num_averaged() == 0:
            return {"num_averaged": 0}
        holder = self._model if self._swapped else self._averaged.module
        assert holder is not None
        return {"num_averaged": self._num_averaged(), "average": dict(holder.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """May be called before `on_fit_start` too. Raises CheckpointError where the average is of another model."""
        if self._averaged is None:
            self._loaded = state
        else:
            self._restore(self._averaged, state)

    def _restore(self, averaged: AveragedModel, state: dict[str, Any]) -> None:
        averaged.n_averaged.fill_(state["num_averaged"])
        if state["num_averaged"] == 0:
            return
        try:
            averaged.module.load_state_dict(state["average"])
        except RuntimeError as error:
            raise CheckpointError(
                f"The average in the checkpoint doesn't fit the model.\n{error}\n"
                f"Resume with the model the run was started with."
            ) from error

    @torch.no_grad()
    def _update(self, averaged: AveragedModel, model: nn.Module) -> None:
        """Do what `averaged.update_parameters` does without waiting for the GPU, to which that copies its count."""
        if self._num_averaged() == 0:
            averaged.update_parameters(model)
            return
        floats: list[tuple[Tensor, Tensor]] = []
        others: list[tuple[Tensor, Tensor]] = []  # buffers of integers, which are averaged by another rule
        for own, new in zip(self._tensors(averaged.module), self._tensors(model), strict=True):
            (floats if own.is_floating_point() or own.is_complex() else others).append((own.detach(), new.detach()))
        for pairs in (floats, others):
            if pairs:
                averages, currents = map(list, zip(*pairs, strict=True))
                self._average(averages, currents, averaged.n_averaged)
        if not self._use_buffers:
            for buffer, current in zip(averaged.module.buffers(), model.buffers(), strict=True):
                buffer.copy_(current)
        averaged.n_averaged += 1

    def _num_averaged(self) -> int:
        # Kept on the CPU, so this waits for no device.
        return 0 if self._averaged is None else int(self._averaged.n_averaged)

    @torch.no_grad()
    def _swap(self, model: nn.Module) -> None:
        assert self._averaged is not None
        for own, average in zip(self._tensors(model), self._tensors(self._averaged.module), strict=True):
            kept = own.detach().clone()
            own.copy_(average)
            average.copy_(kept)

    def _tensors(self, model: nn.Module) -> Iterator[Tensor]:
        return chain(model.parameters(), model.buffers() if self._use_buffers else ())
