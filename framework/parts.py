"""What a run is made of, and the part of its state that lies in there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from framework.optim import Schedule
from framework.precision import PrecisionPlugin
from framework.progress import hooks
from framework.types import Callback, Logger, Strategy, Task


@dataclass(frozen=True)
class Parts:
    """What a run is made of. `model` is as the strategy wrapped it."""

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

    def evaluation_weights(self) -> ExitStack:
        """While entered, the bare model holds the weights to evaluate, equal on all ranks. Every rank must call it."""
        stack = ExitStack()
        for swap in hooks(self.callbacks.values(), "evaluation_weights"):
            stack.enter_context(swap(self.bare_model))
        self.strategy.before_evaluation(self.model)
        return stack

    def model_states(self) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """The weights to evaluate; and those to train on, None where they are the same. Every rank must call it."""
        model = self.bare_model.state_dict()
        if not hooks(self.callbacks.values(), "evaluation_weights"):
            return model, None
        trained = {name: tensor.clone() for name, tensor in model.items()}
        with self.evaluation_weights():
            # Cloned: these tensors hold the average only while it is swapped in.
            return {name: tensor.clone() for name, tensor in self.bare_model.state_dict().items()}, trained

    def state_dict(self) -> dict[str, Any]:
        """Of strategy, optimizer, schedule, loss scaler and callbacks. Every rank must call it."""
        strategy = hooks([self.strategy], "state_dict")
        return {
            "strategy": strategy[0](self.model) if strategy else {},
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.precision.scaler.state_dict(),
            "callbacks": {name: hook() for name, hook in self._callback_hooks("state_dict")},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave, once the weights are there; callbacks that are new begin anew.

        Every rank must call it. What a strategy does for it leaves weights and generators as they are.
        """
        for load in hooks([self.strategy], "load_state_dict"):
            load(self.model, state.get("strategy", {}))
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.precision.scaler.load_state_dict(state["scaler"])
        for name, load in self._callback_hooks("load_state_dict"):
            if name in state["callbacks"]:
                load(state["callbacks"][name])

    def _callback_hooks(self, name: str) -> Iterator[tuple[str, Callable[..., Any]]]:
        for key, callback in self.callbacks.items():
            for hook in hooks([callback], name):
                yield key, hook
