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
from torch.optim import SGD

from framework.config.schema import Precision
from framework.distributed.context import Context
from framework.errors import CheckpointError, ConfigError
from framework.strategies.allreduce import AllReduce
from framework.strategies.averaging import Bucket, average, broadcast, group_by_dtype
from framework.strategies.base import NO_CONTEXT
from framework.strategies.parameters import check_same_change, trained


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
        if every_n_steps < 1:
            raise ConfigError(f"strategy.every_n_steps={every_n_steps} must be 1 or more: steps between two averages.")
        super().__init__(context=context, broadcast_buffers=broadcast_buffers, bucket_cap_mb=bucket_cap_mb)
        self._every, self._warmup = every_n_steps, warmup_steps
        self._outer_options: dict[str, Any] = {"lr": outer_lr, "momentum": outer_momentum, "nesterov": nesterov}
        self._changes_nothing = self._is_alone and outer_lr == 1 and outer_momentum == 0
        self._outer: SGD | None = None  # steps the anchors; None until ranks step by themselves
        self._weights: dict[str, nn.Parameter] = {}  # the trained ones
        self._anchors: list[Tensor] = []  # in the order of the weights
        self._steps = 0
        self._source = 0  # the rank whose buffers are broadcast with the next average
        self.replicas_differ = not self._is_alone
        self.exchanges_every = every_n_steps
        self.copies_gradients = warmup_steps > 0
        self.weight_copies = 0 if self._changes_nothing else 1 + (outer_momentum > 0)

    def check_precision(self, precision: Precision) -> None:
        """Raise ConfigError for a scaled loss: each rank would skip other steps."""
        if precision == "16-mixed" and self.replicas_differ:
            raise ConfigError(
                f"trainer.precision={precision} scales the loss and skips a step whose gradients overflow. "
                f"Under strategy={self.name} each process would skip steps of its own, and their learning rates would "
                "drift apart.\nUse trainer.precision=bf16-mixed, or another strategy."
            )

    @property
    def steps_to_exchange(self) -> int:  # type: ignore[override]
        """Steps until the next exchange, in which every rank takes part."""
        past = self._steps - self._warmup
        return 1 if past < 0 else self._every - past % self._every

    def rewrap(self, model: nn.Module, *, changed: Mapping[str, bool]) -> nn.Module:
        """Return the same module. Weights are averaged first, so that those frozen now are equal on all ranks.

        Weights that stay trained keep their outer momentum.
        """
        check_same_change(changed, self._context)
        if self._outer is not None:
            self._average(model)
        momentum = self._momentum()
        self._make_buckets(model)
        if self._outer is not None:
            self._set_anchors(momentum)
        return model

    def accumulate(self, model: nn.Module, *, synchronise: bool) -> AbstractContextManager[Any]:
        """Exchange gradients in a warm-up; else leave each rank its own."""
        if self._steps < self._warmup:
            return super().accumulate(model, synchronise=synchronise)
        if self._outer is None and not self._changes_nothing:
            self._set_anchors({})
        return NO_CONTEXT

    def after_update(self, model: nn.Module) -> None:
        """Count the step, and average the weights if it is time. Every rank must call it."""
        self._steps += 1
        past = self._steps - self._warmup
        if past == 0:
            self._buckets = []  # their memory isn't needed any more
        elif past > 0 and past % self._every == 0 and self._outer is not None:
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
        weights: list[Tensor] = list(self._weights.values()) if self._outer is not None and not self._is_alone else []
        buffers = list(model.buffers()) if self._broadcasts_buffers else []
        own = [each.detach().clone() for each in (*weights, *buffers)]
        with torch.no_grad():
            if self._outer is not None and weights:
                torch._foreach_copy_(weights, torch._foreach_sub(self._anchors, self._outer_gradients()))
                self._outer.zero_grad()
            broadcast(buffers, source=self._source)
        try:
            yield
        finally:
            with torch.no_grad():
                for each, value in zip((*weights, *buffers), own, strict=True):
                    each.copy_(value)

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return what is equal on all ranks: the number of steps, the anchors and the outer momentum, not copied.

        Each rank's own weights aren't part of it: because of `replicas_differ` they are saved as well.
        """
        return {
            "steps": self._steps,
            "anchor": dict(zip(self._weights, self._anchors, strict=False)),
            "momentum": self._momentum(),
        } | ({"buffers_of": self._source} if self._source else {})

    def load_state_dict(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Restore it, on any number of ranks; without a state the count of steps starts from 0.

        Raises CheckpointError if it is of other weights.
        """
        self._steps = state.get("steps", 0)
        source = state.get("buffers_of", 0)
        self._source = source if source < self._context.world_size else 0
        if self._steps >= self._warmup:
            self._buckets = []
        anchors = state.get("anchor", {})
        if anchors and anchors.keys() != self._weights.keys():
            raise CheckpointError(
                f"The checkpoint's state of strategy={self.name} is of other weights: "
                f"{', '.join(sorted(anchors.keys() ^ self._weights.keys()))} are only in one.\n"
                "Resume with requires_grad as it was, or start a new run from these weights with init_from."
            )
        if anchors and not self._changes_nothing:
            self._set_anchors(state.get("momentum", {}))
            for name, anchor in zip(self._weights, self._anchors, strict=True):
                anchor.copy_(anchors[name])

    def _make_buckets(self, model: nn.Module) -> None:
        self._weights = {name: each for name, each in model.named_parameters() if each.requires_grad}
        if self._steps < self._warmup:
            super()._make_buckets(model)
        else:
            trained(model, strategy=self.name)

    def _set_anchors(self, momentum: Mapping[str, Tensor]) -> None:
        """Take the weights, which are equal on all ranks now, as anchors. momentum: by the weights' names."""
        self._anchors = [weight.detach().clone() for weight in self._weights.values()]
        self._outer = SGD(self._anchors, **self._outer_options)
        if self._outer_options["momentum"]:
            for name, anchor in zip(self._weights, self._anchors, strict=True):
                if name in momentum:
                    self._outer.state[anchor]["momentum_buffer"] = momentum[name].to(anchor.device, copy=True)

    def _momentum(self) -> dict[str, Tensor]:
        """Return the outer momentum by the weights' names, empty before the first average."""
        states: Mapping[Any, Any] = {} if self._outer is None else self._outer.state
        return {
            name: states[anchor]["momentum_buffer"]
            for name, anchor in zip(self._weights, self._anchors, strict=False)
            if "momentum_buffer" in states.get(anchor, {})
        }

    @torch.no_grad()
    def _average(self, model: nn.Module) -> None:
        assert self._outer is not None
        with self._reported_as_waiting():
            self._outer_gradients()
            self._outer.step()
            self._outer.zero_grad()
            torch._foreach_copy_(list(self._weights.values()), self._anchors)
            if self._broadcasts_buffers:
                broadcast(model.buffers(), source=self._source)

    def _outer_gradients(self) -> list[Tensor]:
        """Set and return each anchor's gradient: the anchor minus the mean of the ranks' weights."""
        for anchor, weight in zip(self._anchors, self._weights.values(), strict=True):
            anchor.grad = anchor - weight
        if not self._is_alone:
            groups = group_by_dtype(self._anchors, cap_bytes=self._cap_bytes)
            # Made one by one: a bucket replaces the gradients that it takes in.
            average((Bucket(group) for group in groups), self.begin_mean)
        return [anchor.grad for anchor in self._anchors if anchor.grad is not None]
