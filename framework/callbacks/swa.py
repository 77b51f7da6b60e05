"""Stochastic weight averaging: the plain mean of the weights after each of the last epochs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, final

from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import get_swa_multi_avg_fn

from framework.callbacks.weight_average import WeightAverage
from framework.errors import ConfigError
from framework.types import Callback, FitInfo, StepInfo

_STRATEGIES = ("cos", "linear")


@final
class StochasticWeightAveraging(Callback):
    """Average the weights after each epoch from `swa_epoch_start` on, all with equal weight (`torch.optim.swa_utils`).

    The average is evaluated and saved in place of the weights. After each update its BatchNorm statistics are
    computed by a pass over the training data, as `torch.optim.swa_utils.update_bn` does: about a third of an epoch's
    time, and nothing for models without BatchNorm. Every rank keeps one copy of the model in float32 or wider. Before
    the first update the model is evaluated and saved as it is.
    Averaging Weights Leads to Wider Optima and Better Generalization, https://arxiv.org/abs/1803.05407.

    Args:
        swa_lrs: The learning rate from `swa_epoch_start` on, or one for each parameter group, in place of the
            schedule's; None keeps the schedule's.
        swa_epoch_start: An epoch (an int, counted from 0), or a share of all epochs (a float below 1).
        annealing_epochs: Epochs in which the rate moves from what it was to `swa_lrs`, once per epoch; 0: at once.
        annealing_strategy: `cos` or `linear`.
    """

    # The ranks' buffers differ until they are evaluated.
    state_is_rank_zero = True

    def __init__(
        self,
        swa_lrs: float | Sequence[float] | None = None,
        swa_epoch_start: int | float = 0.8,
        annealing_epochs: int = 10,
        annealing_strategy: str = "cos",
    ) -> None:
        is_epoch = isinstance(swa_epoch_start, int) and swa_epoch_start >= 0
        is_share = isinstance(swa_epoch_start, float) and 0 <= swa_epoch_start < 1
        if not is_epoch and not is_share:
            raise ConfigError(
                f"StochasticWeightAveraging: swa_epoch_start={swa_epoch_start!r} is neither an epoch (an int from 0 "
                "on) nor a share of all epochs (a float from 0 to below 1)."
            )
        if annealing_epochs < 0:
            raise ConfigError(f"StochasticWeightAveraging: annealing_epochs={annealing_epochs} is below 0.")
        if annealing_strategy not in _STRATEGIES:
            raise ConfigError(
                f"StochasticWeightAveraging: annealing_strategy={annealing_strategy!r} is not known. Use one of: "
                f"{', '.join(_STRATEGIES)}."
            )
        rates = [swa_lrs] if isinstance(swa_lrs, (int, float)) else list(swa_lrs or ())
        if any(rate <= 0 for rate in rates):
            raise ConfigError(f"StochasticWeightAveraging: swa_lrs={swa_lrs} is not above 0.")
        self._swa_lrs = rates
        self._swa_epoch_start = swa_epoch_start
        self._annealing_epochs = annealing_epochs
        self._annealing_strategy = annealing_strategy
        # The first epoch whose weights are averaged.
        self._start_epoch = 0
        # The epoch of the next step.
        self._epoch = 0
        # The learning rate of each group before the first step of `_start_epoch`; None until then.
        self._start_lrs: list[float] | None = None
        # The state of a checkpoint, until there is a copy of the model to load it into.
        self._loaded: dict[str, Any] | None = None
        self._average: WeightAverage

    def on_fit_start(self, info: FitInfo) -> None:
        self._info = info
        self._start_epoch = self._first_epoch(info)
        update_averages: Any = get_swa_multi_avg_fn()
        # Buffers are averaged as well; BatchNorm's statistics are computed after each update.
        self._average = WeightAverage(info.model, update_averages=update_averages, use_buffers=True)

        groups = len(info.optimizer.param_groups)
        if len(self._swa_lrs) not in (0, 1, groups):
            raise ConfigError(
                f"StochasticWeightAveraging: swa_lrs has {len(self._swa_lrs)} rates, and the optimizer has {groups} "
                "parameter groups. Give one rate, or one for each group."
            )

        if self._loaded is not None:
            self._average.load_state_dict(self._loaded)
            self._epoch = self._loaded["epoch"]
            self._start_lrs = self._loaded["start_lrs"]
            # Once averaging or annealing has begun, its first epoch stays, even if the run has another length now.
            if self._average.num_averaged or self._start_lrs is not None:
                self._start_epoch = self._loaded["start_epoch"]
        self._loaded = None

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Set the learning rate before each step, since a schedule may set it after each step."""
        if not self._swa_lrs or self._epoch < self._start_epoch:
            return
        groups = self._info.optimizer.param_groups
        if self._start_lrs is None:
            self._start_lrs = [float(group["lr"]) for group in groups]

        # How far the rate has moved from what it was to `swa_lrs`.
        share = 1.0
        if self._annealing_epochs:
            share = min(1.0, (self._epoch - self._start_epoch) / self._annealing_epochs)
        if self._annealing_strategy == "cos":
            share = (1 - math.cos(math.pi * share)) / 2

        swa_lrs = self._swa_lrs if len(self._swa_lrs) > 1 else self._swa_lrs * len(groups)
        for group, swa_lr, start_lr in zip(groups, swa_lrs, self._start_lrs, strict=True):
            group["lr"] = swa_lr * share + start_lr * (1 - share)

    def on_train_step_end(self, info: StepInfo) -> None:
        self._epoch = info.epoch + 1 if info.epoch_end else info.epoch
        if info.epoch_end and info.epoch >= self._start_epoch:
            self._average.update()
            self._average.set_buffers(self._info.batchnorm_statistics())

    def evaluation_weights(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which `model` holds the average."""
        return self._average.swapped_in(model)

    def state_dict(self) -> dict[str, Any]:
        return {
            **self._average.state_dict(),
            "epoch": self._epoch,
            "start_epoch": self._start_epoch,
            "start_lrs": self._start_lrs,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the state for `on_fit_start`, which comes after this."""
        self._loaded = state

    def _first_epoch(self, info: FitInfo) -> int:
        """Return the first epoch to average. Raises ConfigError if training ends before it does."""
        epochs = info.max_epochs
        if epochs is None and info.total_steps is not None and info.steps_per_epoch is not None:
            epochs = info.total_steps // info.steps_per_epoch

        start = self._swa_epoch_start
        if isinstance(start, float):
            if epochs is None:
                raise ConfigError(
                    f"StochasticWeightAveraging: swa_epoch_start={start} is a share of all epochs, whose number isn't "
                    "known. Set trainer.max_epochs, or give an epoch."
                )
            start = int(start * epochs)

        if epochs is not None and start >= epochs:
            raise ConfigError(
                f"StochasticWeightAveraging: swa_epoch_start={self._swa_epoch_start} never comes: training has "
                f"{epochs} epochs, counted from 0. Begin earlier or train longer."
            )
        return start
