"""Steps of an optimizer that computes the loss itself, such as LBFGS or SAM: its closure repeats the step's passes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import final

import torch
from torch import Tensor

from framework.config.schema import TrainerConfig
from framework.distributed.collectives import sum_over_ranks
from framework.distributed.seed import generator_states, restore_generator_states
from framework.monitoring.rank_status import RankPhase
from framework.training.task_steps import TaskSteps
from framework.training.train_state import TrainState
from framework.types import MicroBatch, Window, hooks


@final
class ClosureSteps:
    """Makes whole steps, as `Trainer.train_step` does, with an optimizer whose step takes a closure.

    Each call of the closure computes the loss and the gradients of the same global batch, with the same random numbers.
    It returns that loss, the same on every rank: so all ranks take the same branches in the optimizer, and call it
    equally often. The first call of a step is logged.

    Args:
        begins_with_gradients: call the closure once before each step, for an optimizer that reads gradients first.
    """

    def __init__(
        self, state: TrainState, settings: TrainerConfig, *, tools: TaskSteps, begins_with_gradients: bool
    ) -> None:
        self._state = state
        self._settings = settings
        self._tools = tools
        self._begins_with_gradients = begins_with_gradients
        self._repeating = hooks([state.task], "repeating")

    def run(self, window: Window) -> Tensor:
        """Make one step; return the detached loss of the last micro-batch in its first pass."""
        state = self._state
        tools = self._tools
        devices = state.context.devices
        # An iterator, and each call of the closure needs all of them.
        micro_batches = list(window.micro_batches)
        # A stand-in isn't a batch of the task's.
        num_batches = len([micro for micro in micro_batches if micro.num_samples])
        generators = generator_states(devices)
        losses: list[Tensor] = []

        def closure() -> Tensor:
            is_first = not losses
            with ExitStack() as stack:
                stack.enter_context(torch.enable_grad())
                if not is_first:
                    restore_generator_states(generators, devices=devices)
                    for repeating in self._repeating:
                        stack.enter_context(repeating(num_batches))
                loss, of_last = self._pass(window, micro_batches, is_first=is_first)
            if is_first:
                losses.append(of_last)
            tools.mark(RankPhase.OPTIMIZER)
            return loss

        if self._begins_with_gradients:
            closure()
        tools.mark(RankPhase.OPTIMIZER)
        state.optimizer.step(closure)  # type: ignore[arg-type]
        tools.note_rates()
        for parameter in state.trainable.parameters:
            parameter.grad = None
        tools.step_schedule()
        tools.finish(window)
        return losses[0]

    def _pass(self, window: Window, micro_batches: Sequence[MicroBatch], *, is_first: bool) -> tuple[Tensor, Tensor]:
        """Compute the gradients of the global batch. Return its loss, and that of this rank's last micro-batch.

        is_first: of the step: what it computes is logged.
        """
        tools = self._tools
        parameters = self._state.trainable.parameters
        for parameter in parameters:
            parameter.grad = None

        # This rank's part of the loss is the `grad` of a tensor, since it is divided as gradients are.
        part = torch.zeros((), dtype=torch.float64, device=self._state.context.device)
        part.grad = torch.zeros_like(part)
        last = len(micro_batches) - 1
        for index, micro in enumerate(micro_batches):
            is_last = index == last
            with tools.isolated(micro), tools.passes(synchronise=is_last):
                output = tools.forward(micro, window=window, index=index)
                loss = tools.weighted(output, micro, window=window)
                if is_last:
                    tools.begin_sum()
                tools.mark(RankPhase.BACKWARD)
                loss.backward()
            # A loss may have one element in any number of dimensions.
            part.grad += loss.detach().reshape(())
            if is_first:
                tools.note(output, micro)
        tools.weights.divide([*parameters, part], count=window.global_count)
        self._clip(is_first=is_first)
        context = self._state.context
        mean = sum_over_ranks(part.grad, context) / context.world_size
        return mean, output.loss.detach()

    def _clip(self, *, is_first: bool) -> None:
        tools = self._tools
        settings = self._settings
        tools.before_optimizer_step(self._state.optimizer)
        clip_value = settings.gradient_clip_val
        if clip_value is None and not (is_first and tools.logs):
            return
        norm = tools.clip(self._state.trainable.parameters, clip_value, settings.gradient_clip_algorithm)
        if is_first and norm is not None:
            tools.note_norm("grad_norm", norm)
