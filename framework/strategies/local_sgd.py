"""Local SGD and DiLoCo, for slow networks: each rank trains its own weights, which are averaged every few steps.

S. U. Stich, Local SGD Converges Fast and Communicates Little, https://arxiv.org/abs/1805.09767. With warm-up: T. Lin,
S. U. Stich, K. K. Patel, M. Jaggi, Don't Use Large Mini-Batches, Use Local SGD, https://arxiv.org/abs/1808.07217. With
an outer optimizer: A. Douillard et al., DiLoCo, https://arxiv.org/abs/2311.08105.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from framework.config.schema import Precision
from framework.distributed.context import Context
from framework.strategies.allreduce import AllReduce
from framework.strategies.averaging import average_gradients, broadcast
from framework.strategies.base import NO_CONTEXT, StrategyCosts
from framework.strategies.local_sgd_rules import LocalSGDRules, check_exchanges, check_own_steps
from framework.strategies.parameters import check_same_change


@final
class LocalSGD(AllReduce):
    """Each rank steps its own optimizer on its share of every global batch; weights are averaged every n steps.

    The anchors are the weights after the last average. Their gradient is the anchor minus the mean of the ranks'
    weights; one step of the outer optimizer, SGD, gives the next anchors. A weight that no rank has changed stays bit
    for bit. A single rank follows the same rule without an exchange.

    A rank's gradient is that of its samples times W over the global batch's size, so that the unweighted mean over
    ranks is the gradient of the whole batch, however it was split; a rank without samples steps with a gradient of
    zero. So weight decay and momentum act on all ranks equally, and averaging in every step ends where `AllReduce`
    does with SGD.

    Args:
        every_n_steps: Optimizer steps between two averages.
        warmup_steps: Steps at the start in which gradients are averaged, as by `AllReduce`.
        outer_lr, outer_momentum, nesterov: Of the outer SGD; 1 without momentum takes the mean itself. Each rank's own
            optimizer keeps its own state.
        broadcast_buffers: Give all ranks rank 0's buffers (BatchNorm's statistics) with each average, for evaluation
            and in checkpoints; in a warm-up before each step. False leaves each rank its own.
        bucket_cap_mb: As for `AllReduce`, also of weights.
    """

    rules = LocalSGDRules
    name = "local_sgd"

    def __init__(
        self,
        *,
        context: Context,
        every_n_steps: int = 10,
        warmup_steps: int = 0,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        nesterov: bool = False,
        broadcast_buffers: bool = True,
        bucket_cap_mb: float = 25,
    ) -> None:
        check_exchanges(every_n_steps)
        super().__init__(context=context, broadcast_buffers=broadcast_buffers, bucket_cap_mb=bucket_cap_mb)
        self._every = every_n_steps
        self._warmup = warmup_steps
        self._outer: dict[str, Any] = {"lr": outer_lr, "momentum": outer_momentum, "nesterov": nesterov}
        # By name, in the order of the trained parameters; empty until ranks step by themselves.
        self._anchors: dict[str, Tensor] = {}
        # The momentum of the outer SGD, by name; empty if it has none.
        self._momentum: dict[str, Tensor] = {}
        # Optimizer steps done.
        self._steps = 0
        # The rank whose buffers are broadcast with the next average.
        self._source = 0
        self.replicas_differ = not self._is_alone

    def costs(self) -> StrategyCosts:
        has_momentum = self._outer["momentum"] > 0
        return StrategyCosts(
            exchanges_every=self._every,
            copies_gradients=self._warmup > 0,
            # The anchors, and their momentum.
            weight_copies=2 if has_momentum else 1,
        )

    def check_precision(self, precision: Precision) -> None:
        """Raise ConfigError for a scaled loss: each rank would skip other steps."""
        check_own_steps(precision, replicas_differ=self.replicas_differ)

    @property
    def steps_to_exchange(self) -> int:  # type: ignore[override]
        """Steps until the next exchange, in which every rank takes part."""
        steps_after_warmup = self._steps - self._warmup
        if steps_after_warmup < 0:
            return 1
        return self._every - steps_after_warmup % self._every

    def rewrap(self, model: nn.Module, *, changed: Mapping[str, bool]) -> nn.Module:
        """Return the same module. Weights are averaged first, so that those frozen now are equal on all ranks.

        Weights that stay trained keep their outer momentum.
        """
        check_same_change(changed, self._context)
        if self._anchors:
            self._average(model)
        self._use(model)
        if self._anchors:
            self._set_anchors()
        return model

    def accumulate(self, model: nn.Module, *, synchronise: bool) -> AbstractContextManager[Any]:
        """Exchange gradients in a warm-up; else leave each rank its own."""
        if self._steps < self._warmup:
            return super().accumulate(model, synchronise=synchronise)
        if not self._anchors:
            self._set_anchors()
        return NO_CONTEXT

    def after_update(self, model: nn.Module) -> None:
        """Count the step, and average the weights if it is time. Every rank must call it."""
        self._steps += 1
        steps_after_warmup = self._steps - self._warmup
        if steps_after_warmup > 0 and steps_after_warmup % self._every == 0:
            self._average(model)

    def broadcast_buffers(self, model: nn.Module, *, source: int) -> None:
        """Broadcast them with the next average; in a warm-up at once."""
        if self._steps < self._warmup:
            super().broadcast_buffers(model, source=source)
        else:
            self._source = source

    def before_evaluation(self, model: nn.Module) -> None:
        """Do nothing: `evaluation_weights` makes the replicas equal for a while."""

    @contextmanager
    def evaluation_weights(self, model: nn.Module) -> Iterator[None]:
        """Let `model` hold the mean over ranks of what it held, and one rank's buffers; restore its own at the exit.

        The weights may be averages over steps: their mean is the average of the mean. Takes memory for a copy of the
        trained weights and the buffers. Every rank must call it.
        """
        weights: list[Tensor] = []
        if self._anchors:
            weights += self._trained.values()
        buffers: list[Tensor] = []
        if self._broadcasts_buffers:
            buffers += model.buffers()
        replaced = weights + buffers
        own_values = [tensor.detach().clone() for tensor in replaced]
        with torch.no_grad():
            if weights:
                means = torch._foreach_sub(list(self._anchors.values()), self._outer_gradients())
                torch._foreach_copy_(weights, means)
            broadcast(buffers, source=self._source)
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in zip(replaced, own_values, strict=True):
                    tensor.copy_(value)

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return what is equal on all ranks: the number of steps, the anchors and the outer momentum, not copied.

        Each rank's own weights aren't part of it: because of `replicas_differ` they are saved as well.
        """
        return {"steps": self._steps, "anchor": dict(self._anchors), "momentum": dict(self._momentum)}

    def load_state_dict(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Restore it, on any number of ranks; without a state the count of steps starts from 0."""
        self._steps = state.get("steps", 0)
        if state.get("anchor"):
            self._set_anchors()
            _copy_by_name(state["anchor"], self._anchors)
            _copy_by_name(state["momentum"], self._momentum)

    def _exchanges_gradients(self) -> bool:
        return super()._exchanges_gradients() and self._steps < self._warmup

    def _set_anchors(self) -> None:
        """Take the weights, which are equal on all ranks now, as anchors."""
        self._anchors = {name: weight.detach().clone() for name, weight in self._trained.items()}
        if self._outer["momentum"]:
            momentum_before = self._momentum
            self._momentum = {}
            for name, anchor in self._anchors.items():
                self._momentum[name] = momentum_before.get(name, torch.zeros_like(anchor))

    @torch.no_grad()
    def _average(self, model: nn.Module) -> None:
        """Take a step of the outer optimizer, and give all ranks its weights."""
        anchors = list(self._anchors.values())
        momentum: list[Tensor | None] = [self._momentum.get(name) for name in self._anchors]
        with self._reported_as_waiting():
            gradients = self._outer_gradients()
            sgd(anchors, gradients, momentum, **self._outer, weight_decay=0.0, dampening=0.0, maximize=False)
            torch._foreach_copy_(list(self._trained.values()), anchors)
            if self._broadcasts_buffers:
                broadcast(model.buffers(), source=self._source)

    def _outer_gradients(self) -> list[Tensor]:
        """Return each anchor minus the mean of the ranks' weights."""
        anchors = self._anchors.values()
        # `average_gradients` averages what is in `grad`.
        for anchor, weight in zip(anchors, self._trained.values(), strict=True):
            anchor.grad = anchor - weight
        if not self._is_alone:
            average_gradients(anchors, cap_bytes=self._cap_bytes, begin_mean=self.begin_mean)
        gradients = [anchor.grad for anchor in anchors if anchor.grad is not None]
        for anchor in anchors:
            anchor.grad = None
        return gradients


def _copy_by_name(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    """Copy the values of the names that both have."""
    for name in source.keys() & target.keys():
        target[name].copy_(source[name])
