"""What a run is made of, and the part of its state that lies in there."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from framework.checkpoint.replicas import REPLICAS, replicas
from framework.distributed.context import Context
from framework.distributed.tensors import is_model_spread, local
from framework.errors import ConfigError, DataError
from framework.meter import Meter, check_output
from framework.optim import Schedule, lay_out_state, with_own_kernels
from framework.precision import PrecisionPlugin
from framework.progress import hooks
from framework.pulse import Phase
from framework.seed import generator_states, restore_generator_states
from framework.strategies.trained import described_change
from framework.types import Callback, Logger, StepOutput, Strategy, Task, Window, replicas_differ


@dataclass
class Parts:
    """What a run is made of. `model` is wrapped by the strategy, and `rewrap` may replace it."""

    model: nn.Module
    task: Task
    strategy: Strategy
    precision: PrecisionPlugin
    optimizer: Optimizer
    schedule: Schedule
    callbacks: Mapping[str, Callback]
    loggers: Mapping[str, Logger]  # empty but on rank 0

    @property
    def bare_model(self) -> nn.Module:
        return self.strategy.unwrap(self.model)

    def window_runner(self, meter: Meter, *, mark: Callable[[Phase], None]) -> Callable[..., Tensor] | None:
        """The strategy's own way through forward and backward, called with a window and `step`; None without one."""
        run = getattr(self.strategy, "run_window", None)
        if run is None:
            return None

        def run_window(window: Window, *, step: int, checks_output: bool) -> Tensor:
            def add(output: StepOutput) -> None:
                if checks_output:
                    check_output(output, self.task, "training_step")
                meter.add(output, step=step)

            loss: Tensor = run(self.model, window, task=self.task, precision=self.precision, add=add, mark=mark)
            return loss

        return run_window

    def rewrap(self, changed: Mapping[str, bool]) -> None:
        """Have the strategy rebuild what it made for the parameters that were trained before.

        changed: name → whether it is trained now. Raises ConfigError if the strategy has no `rewrap` or no parameter is
        left to train; passes on what the strategy raises.
        """
        rewrap = hooks([self.strategy], "rewrap")
        if not rewrap:
            raise ConfigError(
                f"requires_grad of parameters has changed during training ({described_change(changed)}), and strategy "
                f"{type(self.strategy).__name__} has no `rewrap` method, which that needs.\n"
                "Set requires_grad when the model is built, or add that method: see framework.Strategy."
            )
        self.model = rewrap[0](self.model, changed=changed)
        if not any(parameter.requires_grad for parameter in self.bare_model.parameters()):
            raise ConfigError(
                f"No parameter is left to train ({described_change(changed)}).\n"
                "Keep one trained, or end training: return framework.Stop(reason) from the callback."
            )

    @contextmanager
    def traceless(self, context: Context) -> Iterator[None]:
        """Around forward and backward of a stand-in: buffers (BatchNorm's statistics, say) and generators stay as they
        were, so that nothing but the gradients, to which it adds zeros, knows of it."""
        generators = generator_states(context.devices)
        kept = {name: buffer.clone() for name, buffer in self.bare_model.named_buffers()}
        yield
        restore_generator_states(generators, devices=context.devices)
        with torch.no_grad():
            for name, buffer in self.bare_model.named_buffers():
                if name in kept:
                    buffer.copy_(kept[name])

    def take_buffers(self, window: Window, *, begins_epoch: bool) -> None:
        """Have replicas that keep buffers equal take them, after the window, from the first rank with a sample of it.

        Every rank must call it. Raises DataError, on all, where each keeps its own and the first, whose are saved, has
        none to fill them with.
        """
        source = window.first_rank
        if source is None:
            return
        for take in hooks([self.strategy], "take_buffers"):
            are_taken = take(self.model, source=source)
            if source and begins_epoch and not are_taken and any(True for _ in self.bare_model.buffers()):
                raise DataError(
                    "strategy.broadcast_buffers=false leaves each process buffers of its own (BatchNorm's statistics), "
                    "of which the first one's are saved; and the first part of the train stream has no sample, so they "
                    "would stay as they were.\n"
                    "Use strategy.broadcast_buffers=true; or have the first part of data.stream=join hold samples."
                )

    def evaluation_weights(self) -> ExitStack:
        """While entered, the bare model holds the weights to evaluate, equal on all ranks. Every rank must call it."""
        stack = ExitStack()
        for swap in hooks(self.callbacks.values(), "evaluation_weights"):
            stack.enter_context(swap(self.bare_model))
        for swap in self._means():  # the last: of what the callbacks have put there
            stack.enter_context(swap(self.bare_model))
        self.strategy.before_evaluation(self.model)
        return stack

    def model_states(self) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """The weights to evaluate; and those to train on, None where they are the same. Every rank must call it."""
        model = self.bare_model.state_dict()
        if not hooks(self.callbacks.values(), "evaluation_weights") and not self._means():
            return model, None
        with self.evaluation_weights():
            # Copied, with what shares memory: these tensors hold the average only while it is swapped in.
            return copy.deepcopy(self.bare_model.state_dict()), model

    def add_weights(self, training: dict[str, Any]) -> dict[str, Any]:
        """The part of a checkpoint's state that holds the weights to evaluate, `model`; `training` is completed.

        It gets the weights to train on, where those are others. Where the model is spread over ranks the part is
        `sharded`, with the optimizer's state, and `training` gets what isn't spread. Every rank must call it.
        """
        if not is_model_spread(self.bare_model):
            model, trained = self.model_states()
            if trained is not None:
                training["model"] = trained
            return {"model": model}
        from framework.checkpoint.spread import NOTE, take_apart  # takes most of a second to import

        apart = take_apart(self.bare_model, self.optimizer)
        training |= {"optimizer": apart.optimizer, NOTE: apart.note}
        return {"sharded": apart.tensors}

    def changed_by_updates(self) -> list[Tensor]:
        """What only an optimizer's step changes: the weights it trains, and what it keeps of them; this rank's part."""
        groups = self.optimizer.param_groups
        weights = [weight for group in groups for weight in group["params"] if weight.requires_grad]
        kept = [value for entry in self.optimizer.state.values() for value in entry.values()]
        return [local(each) for each in (*weights, *kept) if isinstance(each, Tensor)]

    def state_dict(self, context: Context) -> dict[str, Any]:
        """Return the state of task, strategy, optimizer, schedule, loss scaler and callbacks, and of other replicas.

        Every rank must call it.
        """
        strategy, task = hooks([self.strategy], "state_dict"), hooks([self.task], "state_dict")
        state = {
            "strategy": strategy[0](self.model) if strategy else {},
            "task": task[0]() if task else {},
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.precision.scaler.state_dict(),
            "callbacks": {name: hook() for name, hook in self._callback_hooks("state_dict")},
        }
        if replicas_differ(self.strategy):
            own = {name: state[name] for name in ("optimizer", "callbacks", "task")}
            state[REPLICAS] = replicas({"model": self.bare_model.state_dict(), **own}, context)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, once the weights are there; new callbacks start from scratch.

        Every rank must call it. What a strategy does for it leaves weights and generators as they are.
        """
        for load in hooks([self.strategy], "load_state_dict"):
            load(self.model, state.get("strategy", {}))
        for load in hooks([self.task], "load_state_dict"):
            if "task" in state:
                load(state["task"])
        self.optimizer.load_state_dict(with_own_kernels(state["optimizer"], self.optimizer))
        lay_out_state(self.optimizer)
        self.schedule.load_state_dict(state["schedule"])
        self.precision.scaler.load_state_dict(state["scaler"])
        for name, load in self._callback_hooks("load_state_dict"):
            if name in state["callbacks"]:
                load(state["callbacks"][name])

    def _means(self) -> list[Callable[..., Any]]:
        """The strategy's hook, where each rank trains weights of its own."""
        return hooks([self.strategy], "evaluation_weights") if replicas_differ(self.strategy) else []

    def _callback_hooks(self, name: str) -> Iterator[tuple[str, Callable[..., Any]]]:
        for key, callback in self.callbacks.items():
            for hook in hooks([callback], name):
                yield key, hook
