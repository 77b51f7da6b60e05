"""An exponential moving average of the weights, evaluated and saved in their place."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, final

from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from framework.callbacks.weight_average import WeightAverage
from framework.errors import ConfigError
from framework.types import Callback, FitInfo, StepInfo


@final
@dataclass(eq=False)
class EMAWeightAveraging(Callback):
    """Keep average = decay · average + (1 - decay) · weights, starting from the weights, as Lightning's callback does.

    Every rank keeps one copy of the model, in float32 or wider, on the model's devices. Before the first update the
    model is evaluated and saved as it is.
    """

    # The field that says if buffers are averaged, for the checks that a strategy makes.
    averages_buffers_by: ClassVar = "use_buffers"
    # The ranks' buffers differ until they are evaluated.
    state_is_rank_zero: ClassVar = True

    decay: float = 0.999
    # Update the average after step s if (s - 1) is a multiple of this.
    update_every_n_steps: int = 1
    # Update the average after step s only if (s - 1) is at least this.
    update_starting_at_step: int | None = None
    # Average the buffers (BatchNorm's statistics) too; otherwise the model's own are used.
    use_buffers: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.decay <= 1:
            raise ConfigError(f"EMAWeightAveraging: decay={self.decay} is not between 0 and 1.")
        if self.update_every_n_steps < 1:
            raise ConfigError(f"EMAWeightAveraging: update_every_n_steps={self.update_every_n_steps} is below 1.")
        # The state of a checkpoint, until there is a copy of the model to load it into.
        self._loaded: dict[str, Any] | None = None
        self._average: WeightAverage

    def on_fit_start(self, info: FitInfo) -> None:
        update_averages: Any = get_ema_multi_avg_fn(self.decay)
        self._average = WeightAverage(info.model, update_averages=update_averages, use_buffers=self.use_buffers)
        if self._loaded is not None:
            self._average.load_state_dict(self._loaded)
        self._loaded = None

    def on_train_step_end(self, info: StepInfo) -> None:
        index = info.step - 1
        has_started = index >= (self.update_starting_at_step or 0)
        if has_started and index % self.update_every_n_steps == 0:
            self._average.update()

    def evaluation_weights(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which `model` holds the average."""
        return self._average.swapped_in(model)

    def state_dict(self) -> dict[str, Any]:
        return self._average.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the state for `on_fit_start`, which comes after this."""
        self._loaded = state
