"""Training steps of a LightningModule that the trainer doesn't make itself.

Two kinds: those of a module that overrides hooks of the optimization, which Lightning's loop calls in a certain order,
and those of one with `automatic_optimization = False`, which goes backward and steps its optimizers itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from framework.distributed.context import Context
from framework.errors import TargetError
from framework.monitoring.rank_status import RankPhase
from framework.strategies.averaging import MB, average_gradients, broadcast
from framework.tasks.lightning.trainer import TrainerView
from framework.types import Batch, MicroBatch, StepOutput, StepTools, Window

# Gradients are exchanged in flat tensors of at most this size, as strategy=allreduce does.
_CAP_BYTES = 25 * MB


class TrainedModule(Protocol):
    """What these loops need of the task."""

    # training_step returned None, so there is nothing to go backward from.
    skips_backward: bool

    @property
    def module(self) -> Any: ...

    def begin_train_batch(self, batch: Batch) -> int:
        """Call what precedes the step, and return the number of the batch in its epoch."""

    def compute(self, model: nn.Module) -> Any:
        """Return the output of `training_step` for the batch that was begun."""

    def note_outputs(self, output: Any, loss: Tensor | None) -> None:
        """Keep what `on_train_batch_end` gets."""

    def call(self, hook: str, *arguments: Any) -> None:
        """Call a hook of callbacks and module, if there is one."""

    @property
    def num_samples(self) -> int: ...


@final
class HookedSteps:
    """Steps in Lightning's order, for hooks that the trainer has no place for.

    For each micro-batch: `training_step`, `on_before_zero_grad`, `optimizer_zero_grad`, `on_before_backward`,
    `backward`, `on_after_backward`. Those of the last one are the closure of `optimizer_step`; after it come
    `on_before_optimizer_step`, `configure_gradient_clipping` and the optimizer's own step.
    """

    def __init__(self, task: TrainedModule, trainer: TrainerView, *, clips: bool) -> None:
        self._task = task
        self._trainer = trainer
        # The module overrides `configure_gradient_clipping`.
        self._clips = clips
        self._tools: StepTools
        trainer.strategy._optimization = self

    def run_step(self, window: Window, tools: StepTools) -> Tensor:
        """Make the step of a window; return the detached loss of its last micro-batch."""
        self._tools = tools
        (optimizer,) = self._trainer.strategy._lightning_optimizers
        module = self._task.module
        loss = torch.zeros(())
        for position, micro in enumerate(window.micro_batches, start=1):
            with tools.isolated(micro):
                batch_idx = self._task.begin_train_batch(tools.formats.convert_batch(micro.batch))
                closure = _Closure(self, micro, window=window, position=position, batch_idx=batch_idx)
                if position < window.num_micro_batches:
                    closure()
                else:
                    module.optimizer_step(self._trainer.current_epoch, batch_idx, optimizer, closure)
                    if closure.loss is None:
                        raise TargetError(
                            f"{type(module).__name__}.optimizer_step hasn't called the closure, which computes the "
                            "loss and its gradients.\nCall optimizer.step(closure=optimizer_closure), or "
                            "optimizer_closure() to leave out the step of the optimizer."
                        )
            assert closure.loss is not None
            loss = closure.loss
            tools.mark(RankPhase.DATA)
        self._trainer.global_step += 1
        tools.step_schedule()
        tools.finish(window)
        return loss

    def go(self, micro: MicroBatch, *, window: Window, position: int, batch_idx: int) -> Tensor:
        """Make forward and backward of a micro-batch; return its weighted loss, detached."""
        tools = self._tools
        task = self._task
        module = task.module
        is_first = position == 1
        is_last = position == window.num_micro_batches
        with tools.passes(synchronise=is_last):
            output = tools.forward(micro, window=window, index=position - 1)
            loss = tools.weighted(output, micro, window=window)
            if is_first:
                (optimizer,) = self._trainer.optimizers
                task.call("on_before_zero_grad", optimizer)
                module.optimizer_zero_grad(self._trainer.current_epoch, batch_idx, optimizer)
            if is_last:
                tools.begin_sum()
            if not task.skips_backward:
                task.call("on_before_backward", loss)
                tools.mark(RankPhase.BACKWARD)
                module.backward(tools.scaler.scale(loss))
        if is_last:
            tools.divide(window)
        if not task.skips_backward:
            task.call("on_after_backward")
        tools.note(output, micro)
        return loss.detach()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure, then what comes between the gradients and the step, then the step."""

        def whole() -> Any:
            result = closure()
            self._after_closure(optimizer)
            return result

        return _step(self._tools, optimizer, whole, **kwargs)

    def clip_gradients(self, optimizer: Optimizer, value: float, algorithm: str) -> None:
        self._tools.clip(parameters_of(optimizer), value, algorithm)

    def _after_closure(self, optimizer: Optimizer) -> None:
        tools = self._tools
        trainer = self._trainer
        tools.mark(RankPhase.OPTIMIZER)
        if tools.scaler.is_enabled():
            tools.scaler.unscale_(optimizer)
        tools.before_optimizer_step(optimizer)

        clip_value = trainer.gradient_clip_val
        algorithm = trainer.gradient_clip_algorithm
        if self._clips:
            if tools.logs:
                self._note_norm(tools.clip(parameters_of(optimizer), None, "norm"))
            self._task.module.configure_gradient_clipping(
                optimizer, gradient_clip_val=clip_value, gradient_clip_algorithm=algorithm
            )
        elif clip_value is not None or tools.logs:
            self._note_norm(tools.clip(parameters_of(optimizer), clip_value, algorithm or "norm"))
        tools.note_rates()

    def _note_norm(self, norm: Tensor | None) -> None:
        if norm is not None:
            self._tools.note_norm("grad_norm", norm)


@final
class _Closure:
    """Forward and backward of a micro-batch; optimizers such as LBFGS call it several times."""

    def __init__(self, steps: HookedSteps, micro: MicroBatch, **arguments: Any) -> None:
        self._steps = steps
        self._micro = micro
        self._arguments = arguments
        # The weighted loss of the last call.
        self.loss: Tensor | None = None

    @torch.enable_grad()
    def __call__(self, *_: Any, **__: Any) -> Tensor:
        self.loss = self._steps.go(self._micro, **self._arguments)
        return self.loss


@final
class ManualSteps:
    """Steps of a module with `automatic_optimization = False`: its `training_step` does it all.

    The strategy's own exchange isn't used: a backward of a part of the model, or two of one, don't fit DDP's reducer.
    `manual_backward` multiplies the loss by this rank's share of the global batch, and before an optimizer steps, the
    gradients of its parameters are averaged over ranks.
    """

    def __init__(
        self, task: TrainedModule, trainer: TrainerView, context: Context, *, broadcasts_buffers: bool
    ) -> None:
        self._task = task
        self._trainer = trainer
        self._context = context
        self._is_alone = context.world_size == 1
        self._broadcasts_buffers = broadcasts_buffers and not self._is_alone
        self._tools: StepTools
        # Of the present batch.
        self._share = 1.0
        self._losses: list[Tensor] = []
        # By optimizer: the parameters that it trains, found at the first step, since they may be toggled.
        self._trained: dict[int, list[Tensor]] = {}
        # Optimizers whose gradients are means over ranks already.
        self._averaged: set[int] = set()
        # How often each gradient had been changed when the last backward was done.
        self._versions: dict[int, int] = {}
        self._is_stepping = False
        trainer.strategy._optimization = self

    def run_step(self, window: Window, tools: StepTools) -> Tensor:
        """Make the step of a window of one micro-batch; return the detached loss that is logged."""
        self._tools = tools
        task = self._task
        module = task.module
        if not self._trained:
            self._note_trained()
        (micro,) = window.micro_batches
        self._share = tools.share(micro, window=window)
        self._losses = []
        tools.note_rates()
        if self._broadcasts_buffers:
            broadcast(list(module.buffers()))

        with tools.isolated(micro):
            batch = tools.formats.convert_batch(micro.batch)
            task.begin_train_batch(batch)
            tools.before_micro_batch(batch, micro, window=window, index=0)
            tools.mark(RankPhase.FORWARD)
            with tools.formats.autocast():
                output = task.compute(module)
            loss = self._logged_loss(output)
            returned = output.get("loss") if isinstance(output, Mapping) else output
            task.note_outputs(output, returned)
        step_output = StepOutput(loss, task.num_samples)
        tools.after_output(step_output)
        tools.note(step_output, micro)
        if self._broadcasts_buffers and window.first_rank is not None:
            broadcast(list(module.buffers()), source=window.first_rank)
        tools.mark(RankPhase.DATA)
        return loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Go backward from this rank's share of the loss."""
        tools = self._tools
        self._losses.append(loss.detach())
        if self._share != 1.0:
            loss = loss * self._share
        self._task.call("on_before_backward", loss)
        tools.mark(RankPhase.BACKWARD)
        self._task.module.backward(tools.scaler.scale(loss), *args, **kwargs)
        self._averaged.clear()
        if not self._is_alone:
            self._note_versions()
        self._task.call("on_after_backward")
        tools.mark(RankPhase.FORWARD)
        return loss.detach()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Average the gradients and step the optimizer."""
        tools = self._tools

        def whole() -> Any:
            result = closure()
            tools.mark(RankPhase.OPTIMIZER)
            self._average(optimizer)
            if tools.scaler.is_enabled():
                tools.scaler.unscale_(optimizer)
            tools.before_optimizer_step(optimizer)
            if tools.logs:
                self._note_norm(optimizer)
            return result

        self._is_stepping = True
        result = _step(tools, optimizer, whole, **kwargs)
        self._is_stepping = False
        self._trainer.global_step += 1
        tools.mark(RankPhase.FORWARD)
        return result

    def clip_gradients(self, optimizer: Optimizer, value: float, algorithm: str) -> None:
        """Clip the averaged gradients."""
        self._average(optimizer)
        self._tools.clip(parameters_of(optimizer), value, algorithm)
        self._note_versions()

    # Gradients between two steps, for checkpoints

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients that wait for a later step, by the names of their parameters."""
        gradients = {}
        for name, parameter in self._task.module.named_parameters():
            if parameter.grad is not None:
                gradients[name] = parameter.grad.detach().cpu().clone()
        return gradients

    def load_gradients(self, of_ranks: list[dict[str, Tensor]]) -> None:
        """Restore them: each rank its own, or with another number of ranks their mean."""
        if len(of_ranks) == self._context.world_size:
            of_ranks = [of_ranks[self._context.rank]]
        for name, parameter in self._task.module.named_parameters():
            saved = [gradients[name] for gradients in of_ranks if name in gradients]
            parameter.grad = None
            if saved:
                total = torch.stack(saved).sum(0) / len(of_ranks)
                parameter.grad = total.to(device=parameter.device, dtype=parameter.dtype)

    def _note_trained(self) -> None:
        for optimizer in self._trainer.optimizers:
            trained = [parameter for parameter in parameters_of(optimizer) if parameter.requires_grad]
            self._trained[id(optimizer)] = trained
            if not self._is_alone:
                optimizer.register_step_pre_hook(self._check_step)

    def _check_step(self, *_: Any) -> None:
        """Raise TargetError if an optimizer is stepped without the exchange of gradients."""
        if not self._is_stepping:
            raise TargetError(
                f"{self._name} steps an optimizer directly, without the gradients of other processes.\nStep what "
                "self.optimizers() returns, without use_pl_optimizer=False."
            )

    def _average(self, optimizer: Optimizer) -> None:
        """Replace the gradients of an optimizer by their means over ranks, once after each backward."""
        if self._is_alone or id(optimizer) in self._averaged:
            return
        self._averaged.add(id(optimizer))
        trained = self._trained[id(optimizer)]
        for parameter in trained:
            gradient = parameter.grad
            if gradient is not None and self._versions.get(id(gradient), gradient._version) != gradient._version:
                raise TargetError(
                    f"{self._name} changes gradients between manual_backward and the optimizer's step, when they are "
                    "not yet those of all processes.\nClip with self.clip_gradients(optimizer, gradient_clip_val=...), "
                    "and change others in on_before_optimizer_step."
                )
        average_gradients(trained, cap_bytes=_CAP_BYTES)
        self._note_versions()

    def _note_versions(self) -> None:
        self._versions = {}
        for trained in self._trained.values():
            for parameter in trained:
                if parameter.grad is not None:
                    self._versions[id(parameter.grad)] = parameter.grad._version

    def _note_norm(self, optimizer: Optimizer) -> None:
        norm = self._tools.clip(parameters_of(optimizer), None, "norm")
        name = "grad_norm"
        optimizers = self._trainer.optimizers
        if len(optimizers) > 1:
            name = f"grad_norm/{[id(each) for each in optimizers].index(id(optimizer))}"
        if norm is not None:
            self._tools.note_norm(name, norm)

    def _logged_loss(self, output: Any) -> Tensor:
        """Return the loss that `training_step` returned, else the sum of those that it went backward from."""
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if isinstance(loss, Tensor) and loss.numel() == 1:
            return loss.detach().reshape(())
        total = torch.zeros((), device=self._context.device)
        for value in self._losses:
            total = total + value.reshape(()).float()
        return total

    @property
    def _name(self) -> str:
        return type(self._task.module).__name__


def _step(tools: StepTools, optimizer: Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
    """Step an optimizer with a closure, scaled if the precision needs that."""
    if not tools.scaler.is_enabled():
        return optimizer.step(closure=closure, **kwargs)
    result = closure()
    tools.scaler.step(optimizer, **kwargs)
    tools.scaler.update()
    return result


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    parameters: list[Tensor] = []
    groups: Iterable[Mapping[str, Any]] = optimizer.param_groups
    for group in groups:
        parameters += group["params"]
    return parameters
