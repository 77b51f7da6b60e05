"""The parts of the trainer's step for a task that runs its steps itself, as Lightning's manual optimization does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, final

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from framework.config.schema import TrainerConfig
from framework.monitoring.rank_status import RankPhase
from framework.optim.clipping import clip_gradients
from framework.training.logbook import Logbook
from framework.training.loss_weights import LossWeights
from framework.training.step_times import StepTimer
from framework.training.train_state import TrainState
from framework.types import Batch, MicroBatch, NumberFormats, StepOutput, Window


@final
class TaskSteps:
    """What `framework.types.StepTools` says.

    Args:
        compute: returns what the task's `training_step` computes from a micro-batch.
        before_optimizer_step, before_micro_batch, after_output: call the hooks of callbacks.
        isolate: returns the context in which a stand-in leaves nothing but gradients.
        num_shares: parts that a global batch is split into.
        counts: this rank's outputs are logged.
    """

    def __init__(
        self,
        state: TrainState,
        settings: TrainerConfig,
        *,
        timer: StepTimer,
        logbook: Logbook,
        weights: LossWeights,
        compute: Callable[..., StepOutput],
        before_optimizer_step: Callable[[Optimizer], None],
        before_micro_batch: Callable[..., None],
        after_output: Callable[[StepOutput], None],
        isolate: Callable[[MicroBatch], AbstractContextManager[Any]],
        num_shares: int,
        counts: bool,
    ) -> None:
        # Replaced for steps that exchange nothing, as in job=tune.
        self.weights = weights
        self._state = state
        self._settings = settings
        self._timer = timer
        self._logbook = logbook
        self._compute = compute
        self._before_optimizer_step = before_optimizer_step
        self._before_micro_batch = before_micro_batch
        self._after_output = after_output
        self._isolate = isolate
        self._num_shares = num_shares
        self._counts = counts

    @property
    def model(self) -> nn.Module:
        return self._state.model

    @property
    def formats(self) -> NumberFormats:
        return self._state.precision

    @property
    def scaler(self) -> GradScaler:
        return self._state.precision.scaler

    @property
    def logs(self) -> bool:
        return self._logbook.is_due(self._state.progress.step + 1)

    def mark(self, phase: int) -> None:
        self._timer.set_phase(RankPhase(phase))

    def isolated(self, micro: MicroBatch) -> AbstractContextManager[Any]:
        return self._isolate(micro)

    def passes(self, *, synchronise: bool) -> AbstractContextManager[Any]:
        state = self._state
        return state.strategy.accumulate(state.model, synchronise=synchronise)

    def forward(self, micro: MicroBatch, *, window: Window, index: int) -> StepOutput:
        self.mark(RankPhase.FORWARD)
        return self._compute(micro, window=window, index=index)

    def before_micro_batch(self, batch: Batch, micro: MicroBatch, *, window: Window, index: int) -> None:
        self._before_micro_batch(batch, micro, window=window, index=index)

    def after_output(self, output: StepOutput) -> None:
        self._after_output(output)

    def weighted(self, output: StepOutput, micro: MicroBatch, *, window: Window) -> Tensor:
        is_only = window.num_micro_batches == 1
        scale = self._num_shares / window.global_count
        return self.weights.weighted(output, num_samples=micro.num_samples, scale=scale, is_only=is_only)

    def share(self, micro: MicroBatch, *, window: Window) -> float:
        return micro.num_samples * self._num_shares / window.global_count

    def begin_sum(self) -> None:
        self.weights.begin_sum()

    def divide(self, window: Window) -> None:
        self.weights.divide(self._state.trainable.parameters, count=window.global_count)

    def note(self, output: StepOutput, micro: MicroBatch) -> None:
        has_samples = micro.num_samples > 0 and output.num_samples > 0
        if has_samples and self._counts:
            self._state.meter.add(output, step=self._state.progress.step + 1)

    def clip(self, parameters: Sequence[Tensor], value: float | None, algorithm: str) -> Tensor | None:
        settings = replace(self._settings, gradient_clip_val=value, gradient_clip_algorithm=algorithm)  # type: ignore[arg-type]
        return clip_gradients(parameters, settings, norm_over_ranks=self._state.strategy.total_norm)

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        self._before_optimizer_step(optimizer)

    def note_norm(self, name: str, norm: Tensor) -> None:
        self._logbook.grad_norms[name] = norm

    def note_rates(self) -> None:
        self._logbook.lrs = [group["lr"] for group in self._state.optimizer.param_groups]

    def step_schedule(self) -> None:
        self._state.schedule.step_after("step")

    def finish(self, window: Window) -> None:
        state = self._state
        if window.first_rank is not None:
            # Rank 0 may have had no sample, so its buffers may lack this step.
            state.strategy.broadcast_buffers(state.model, source=window.first_rank)
        state.strategy.after_update(state.model)
